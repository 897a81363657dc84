"""Policy losses against a reference written out token by token: values, gradients, and the ways a batch may be split."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from megatron_rl.config.sections import Objective
from megatron_rl.metrics import merge, to_floats
from megatron_rl.objective import Denominators, PolicyLoss, token_batch
from tests.unit.objective.reference import random_microbatch, random_policies, reference_loss, tokens_of

DENOMINATORS = Denominators(tokens=41, sequences=9)  # of the whole update, not of the microbatch

OBJECTIVES = [
    Objective(name=name, correction=correction, normalisation=normalisation, correction_low=0.9, correction_high=1.1)
    for name, correction, normalisation in product(
        ("grpo", "cispo", "gspo"), ("none", "truncate", "mask_token", "mask_sequence"), ("token", "sequence")
    )
] + [
    Objective(name="grpo", old_policy="rollout", correction="none"),
    Objective(name="gspo", old_policy="rollout", correction="none", normalisation="sequence"),
    Objective(name="grpo", kl_coefficient=0.3),
    Objective(name="cispo", kl_coefficient=0.3, correction="mask_token", normalisation="sequence"),
    Objective(name="grpo", off_policy_sequence_delta=0.05),
    Objective(name="gspo", off_policy_sequence_delta=0.05, kl_coefficient=0.2),
    Objective(name="grpo", clip_low=0.0, clip_high=1.0, advantage="group_mean_std"),
]


def name_of(o: Objective) -> str:
    changed = {k: v for k, v in o.model_dump().items() if v != Objective.model_fields[k].default}
    return ",".join(f"{k}={v}" for k, v in changed.items())


def batch_of(m, policies, denominators=DENOMINATORS):
    return token_batch(m, denominators, old_logprobs=policies["old"], reference_logprobs=policies["reference"])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_value_and_gradient(objective):
    """In float64: the value to rounding; the gradient to the error of central differences at 1e-6, about 1e-9."""
    rng = np.random.default_rng(17)
    m = random_microbatch(rng, [5, 9, 3, 7], first_number=2)
    policies = random_policies(rng, m)
    log_probs = policies["logp"].clone().requires_grad_()
    loss, _ = PolicyLoss(objective)(log_probs, batch_of(m, policies))
    loss.backward()

    at = tokens_of(m, policies)
    sizes = DENOMINATORS.tokens, DENOMINATORS.sequences
    assert loss.item() == pytest.approx(reference_loss(objective, at, at, *sizes), abs=1e-12)
    expected = torch.zeros_like(log_probs)
    for i, place in enumerate(np.flatnonzero(m.loss_mask)):
        moved = [replace(at, logp=[*at.logp[:i], at.logp[i] + step, *at.logp[i + 1 :]]) for step in (1e-6, -1e-6)]
        up, down = (reference_loss(objective, t, at, *sizes) for t in moved)
        expected[place] = (up - down) / 2e-6
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-6, atol=1e-9)


def test_the_random_batches_reach_every_branch():
    """Otherwise the test above would prove less than it says."""
    rng = np.random.default_rng(17)
    m = random_microbatch(rng, [5, 9, 3, 7], first_number=2)
    policies = random_policies(rng, m)
    for objective in OBJECTIVES:
        _, measured = PolicyLoss(objective)(policies["logp"], batch_of(m, policies))
        values = to_floats(measured.metrics())
        if objective.clip_high < 1:
            assert 0 < values["clip_fraction"] < 1, objective
        if objective.correction.startswith("mask") or objective.off_policy_sequence_delta:
            assert 0 < values["masked_fraction"] < 1, objective


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_the_split_does_not_matter(objective):
    """One microbatch of six sequences, or three microbatches and an empty one: same loss, gradient and metrics, to rounding."""
    rng = np.random.default_rng(4)
    parts = [
        random_microbatch(rng, [4, 6], first_number=0),
        random_microbatch(rng, [8], first_number=2, padding=0),
        random_microbatch(rng, [], padding=3),
        random_microbatch(rng, [2, 5, 3], first_number=3),
    ]
    whole = joined(parts)
    policies = [random_policies(rng, m) for m in parts]
    together = {name: torch.cat([p[name] for p in policies]) for name in policies[0]}
    loss_of = PolicyLoss(objective)

    log_probs = together["logp"].clone().requires_grad_()
    loss, measured = loss_of(log_probs, batch_of(whole, together))
    loss.backward()

    pieces = [p["logp"].clone().requires_grad_() for p in policies]
    results = [loss_of(piece, batch_of(m, p)) for piece, m, p in zip(pieces, parts, policies, strict=True)]
    sum(part_loss for part_loss, _ in results).backward()

    assert sum(part_loss.item() for part_loss, _ in results) == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat([piece.grad for piece in pieces]), log_probs.grad, rtol=0, atol=1e-14)
    apart = to_floats(merge(part.metrics() for _, part in results))
    assert apart == pytest.approx(to_floats(measured.metrics()), abs=1e-12)


def joined(parts):
    """The microbatches one after the other, as one."""
    arrays = {
        name: np.concatenate([getattr(m, name) for m in parts]) for name, a in vars(parts[0]).items() if isinstance(a, np.ndarray)
    }
    return replace(parts[0], **arrays)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_without_loss_tokens_the_loss_is_zero_and_backward_runs(objective):
    m = random_microbatch(np.random.default_rng(0), [], padding=4)
    log_probs = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    policies = {"old": torch.zeros(4), "reference": torch.zeros(4)}
    loss, measured = PolicyLoss(objective)(log_probs, batch_of(m, policies, Denominators.of(NoTokens())))
    loss.backward()
    assert loss.item() == 0 and log_probs.grad.tolist() == [0.0] * 4
    assert to_floats(measured.metrics()) == {"loss": 0.0}  # nothing else was measured, so nothing is reported


class NoTokens:
    num_loss_tokens = 0
    num_sequences = 0


def test_values_outside_the_loss_tokens_never_matter():
    """Prompt positions and padding may hold anything, NaN too: they are left out, not multiplied by zero."""
    rng = np.random.default_rng(1)
    m = random_microbatch(rng, [5, 4])
    policies = random_policies(rng, m)
    for objective in OBJECTIVES:
        clean, dirty = policies["logp"].clone(), policies["logp"].clone()
        dirty[torch.from_numpy(~m.loss_mask)] = float("nan")
        results = []
        for values in (clean, dirty):
            values.requires_grad_()
            loss, _ = PolicyLoss(objective)(values, batch_of(m, policies))
            loss.backward()
            results.append((loss.item(), values.grad.tolist()))
        assert results[0] == results[1]


def test_one_update_a_step_needs_no_old_log_probs():
    """p_old = p: ratio 1 and nothing clipped; the gradient is that of an old policy equal to the present one."""
    rng = np.random.default_rng(2)
    m = random_microbatch(rng, [5, 4])
    policies = random_policies(rng, m)
    gradients = []
    for old in (None, policies["logp"]):
        log_probs = policies["logp"].clone().requires_grad_()
        loss, measured = PolicyLoss(Objective())(log_probs, token_batch(m, DENOMINATORS, old_logprobs=old))
        loss.backward()
        gradients.append(log_probs.grad)
        assert to_floats(measured.metrics())["clip_fraction"] == 0
    assert torch.equal(*gradients)
    assert not PolicyLoss(Objective()).needs_old_forward(updates_per_step=1)
    assert PolicyLoss(Objective()).needs_old_forward(updates_per_step=2)
    assert not PolicyLoss(Objective(old_policy="rollout", correction="none")).needs_old_forward(updates_per_step=2)


def test_on_policy_gradient_is_the_policy_gradient():
    """With p = p_old = p_rollout all objectives have the gradient of -A log p over the number of tokens."""
    rng = np.random.default_rng(3)
    m = random_microbatch(rng, [6, 5])
    expected = torch.from_numpy(np.where(m.loss_mask, -m.advantages.astype(float) / DENOMINATORS.tokens, 0.0))
    for name in ("grpo", "cispo"):
        log_probs = torch.from_numpy(m.rollout_logprobs).double().requires_grad_()
        loss, _ = PolicyLoss(Objective(name=name))(log_probs, token_batch(m, DENOMINATORS))
        loss.backward()
        torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=0)


def test_a_coefficient_of_zero_keeps_no_graph_alive():
    """Case 16: the reference takes no part, also when its log-probs are there and would need gradients."""
    rng = np.random.default_rng(5)
    m = random_microbatch(rng, [5])
    policies = random_policies(rng, m)
    reference = policies["reference"].clone().requires_grad_()
    batch = token_batch(m, DENOMINATORS, old_logprobs=policies["old"], reference_logprobs=reference)
    assert not batch.reference_logprobs.requires_grad
    without = PolicyLoss(Objective(kl_coefficient=0.0))
    assert not without.needs_reference and PolicyLoss(Objective(kl_coefficient=0.1)).needs_reference
    loss, measured = without(policies["logp"].clone().requires_grad_(), batch)
    assert "kl_reference" not in measured.metrics()
    assert loss.item() == without(policies["logp"], token_batch(m, DENOMINATORS, old_logprobs=policies["old"]))[0].item()


def test_a_missing_reference_is_refused():
    m = random_microbatch(np.random.default_rng(5), [5])
    with pytest.raises(ValueError, match=r"kl_coefficient = 0\.1 needs the reference"):
        PolicyLoss(Objective(kl_coefficient=0.1))(torch.zeros(m.num_positions), token_batch(m, DENOMINATORS))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_extreme_ratios_stay_finite(objective):
    """In fp32 exp overflows at 89: log ratios of +-200 must give no NaN, neither in the loss nor in the gradient."""
    rng = np.random.default_rng(6)
    m = random_microbatch(rng, [9, 8])
    policies = {name: values.float() for name, values in random_policies(rng, m, spread=200.0).items()}
    log_probs = policies["logp"].clamp(max=0).requires_grad_()
    loss, measured = PolicyLoss(objective)(log_probs, batch_of(m, policies))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(log_probs.grad).all()
    assert all(np.isfinite(v) for v in to_floats(measured.metrics()).values())


def test_fp32_agrees_with_float64():
    """The trainer's dtype; sums of 12 terms of order 1 over 41: a few 1e-8."""
    rng = np.random.default_rng(7)
    m = random_microbatch(rng, [9, 8])
    policies = random_policies(rng, m)
    for objective in OBJECTIVES:
        double = PolicyLoss(objective)(policies["logp"], batch_of(m, policies))[0]
        single = {name: values.float() for name, values in policies.items()}
        assert PolicyLoss(objective)(single["logp"], batch_of(m, single))[0].item() == pytest.approx(double.item(), abs=1e-7)


def test_kl_estimator_is_unbiased_under_importance_sampling():
    """Summed over a whole distribution with weights p_old, value and gradient are those of KL(p || p_ref)."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.2, -0.3, 0.5], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([1.0, 0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    from megatron_rl.objective.correction import reference_kl

    logp = logits.log_softmax(0)
    estimate = (old.exp() * reference_kl(logp - old, logp, reference)).sum()
    exact = (logp.exp() * (logp - reference)).sum()
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-14)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, exact)))
