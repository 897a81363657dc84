"""From a microbatch to the loss's tensors; the denominators; the supervised loss."""

import numpy as np
import pytest
import torch

from megatron_rl.config.sections import Objective
from megatron_rl.metrics import merge, to_floats
from megatron_rl.objective import Denominators, PolicyLoss, SupervisedLoss, token_batch
from megatron_rl.records import PlanEntry, StepPlan
from tests.unit.objective.reference import random_microbatch


def test_the_loss_tokens_of_a_microbatch():
    m = random_microbatch(np.random.default_rng(1), [4, 7, 3], first_number=20)
    entropy = torch.rand(m.num_positions, requires_grad=True)
    batch = token_batch(m, Denominators(30, 5), entropy=entropy)
    places = np.flatnonzero(m.loss_mask)
    assert batch.position.tolist() == places.tolist() and batch.num_tokens == len(places)
    assert batch.num_sequences == 3
    assert (batch.sequence + 20).tolist() == m.sequence[places].tolist()  # numbered from 0, in the order of the plan
    assert batch.sequence_tokens.tolist() == [(m.sequence[places] == n).sum() for n in (20, 21, 22)]
    assert batch.staleness.tolist() == m.staleness[places].tolist() and batch.max_staleness == m.staleness.max()
    assert batch.has_set.tolist() == (~m.full_rows[places]).tolist()
    assert torch.equal(batch.entropy, entropy[places]) and not batch.entropy.requires_grad
    assert batch.old_logprobs is None and batch.reference_logprobs is None


def test_denominators_of_a_plan_count_all_of_its_tokens():
    plan = StepPlan(0, tuple(PlanEntry(f"g.{n}", 0, "f", n, 9, n, 0.0) for n in (0, 4, 3)))
    assert Denominators.of(plan) == Denominators(tokens=7, sequences=2)
    assert Denominators.of(StepPlan(0, ())) == Denominators(tokens=1, sequences=1)


def test_entropy_is_reported_over_keep_set_tokens_only():
    m = random_microbatch(np.random.default_rng(1), [9, 9])
    entropy = torch.rand(m.num_positions)
    assert m.full_rows.any()
    _, measured = PolicyLoss(Objective())(torch.zeros(m.num_positions), token_batch(m, Denominators(30, 5), entropy=entropy))
    metrics = measured.metrics()
    kept = torch.from_numpy(m.loss_mask & ~m.full_rows)
    assert metrics["entropy_keep_set"].value == pytest.approx(entropy[kept].double().mean().item(), abs=1e-12)
    assert metrics["entropy_keep_set"].count == kept.sum()
    assert metrics["singleton_share"].value == m.singleton.sum() / m.loss_mask.sum()
    assert metrics["token_staleness_mean"].value == pytest.approx(m.staleness[m.loss_mask].mean())
    assert metrics["token_staleness_max"].value == m.staleness.max()


def test_supervised_loss_is_the_mean_over_the_update_for_every_split():
    rng = np.random.default_rng(2)
    parts = [random_microbatch(rng, [5, 6]), random_microbatch(rng, []), random_microbatch(rng, [3])]
    log_probs = [torch.from_numpy(-rng.random(m.num_positions)).requires_grad_() for m in parts]
    num_tokens = sum(int(m.loss_mask.sum()) for m in parts)
    losses, measured = zip(
        *(SupervisedLoss()(p, token_batch(m, Denominators(num_tokens, 3))) for p, m in zip(log_probs, parts, strict=True)),
        strict=True,
    )
    sum(losses).backward()
    chosen = np.concatenate([p.detach().numpy()[m.loss_mask] for p, m in zip(log_probs, parts, strict=True)])
    assert sum(losses).item() == pytest.approx(-chosen.mean(), abs=1e-14)
    for p, m in zip(log_probs, parts, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), np.where(m.loss_mask, -1 / num_tokens, 0.0), rtol=1e-14)
    values = to_floats(merge(part.metrics() for part in measured))
    assert values["loss"] == pytest.approx(-chosen.mean(), abs=1e-14)
    assert values["target_probability"] == pytest.approx(np.exp(chosen).mean(), abs=1e-14)
