"""The mismatch metrics on distributions whose divergence is known, split by kind of token and by age."""

import numpy as np
import pytest
import torch

from megatron_rl.metrics import to_floats
from megatron_rl.objective import Denominators, TokenBatch, mismatch_metrics, token_batch
from tests.unit.objective.reference import random_microbatch


def batch_with(rollout_logprobs, singleton=None, staleness=None):
    num_tokens = len(rollout_logprobs)
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    staleness = zeros if staleness is None else torch.tensor(staleness)
    return TokenBatch(
        position=torch.arange(num_tokens),
        sequence=zeros,
        sequence_tokens=torch.tensor([float(num_tokens)]),
        rollout_logprobs=rollout_logprobs,
        advantages=torch.zeros(num_tokens),
        staleness=staleness,
        singleton=zeros.bool() if singleton is None else torch.tensor(singleton),
        has_set=~zeros.bool(),
        max_staleness=int(staleness.max()) if num_tokens else 0,
        denominators=Denominators(num_tokens, 1),
    )


def test_without_replay_the_ratio_shows_the_kept_mass_and_k3_is_blind():
    """Cases 5 and 31: a kept mass of .8 gives ratio .8 and k1 = -log .8 = .223 (the true KL), while k3 says .023."""
    full = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    kept = full[:2] / 0.8
    drawn = torch.tensor([0] * 5 + [1] * 3)  # exactly as often as the sampler would
    values = to_floats(mismatch_metrics(full.log()[drawn], batch_with(kept.log()[drawn])).metrics())
    assert values["ratio_mean"] == pytest.approx(0.8, abs=1e-12)
    assert values["mismatch_kl_k1"] == pytest.approx(-np.log(0.8), abs=1e-12)
    assert values["mismatch_kl_k3"] == pytest.approx(0.0231, abs=1e-4)
    assert values["abs_dlogp_mean"] == pytest.approx(-np.log(0.8), abs=1e-12)
    assert values["ratio_off_share"] == 1.0
    replayed = to_floats(mismatch_metrics(kept.log()[drawn], batch_with(kept.log()[drawn])).metrics())
    assert (replayed["ratio_mean"], replayed["mismatch_kl_k1"], replayed["abs_dlogp_max"], replayed["ratio_off_share"]) == (
        1,
        0,
        0,
        0,
    )


def test_on_equal_supports_k1_and_k3_both_estimate_the_kl():
    rollout = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    drawn = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    values = to_floats(mismatch_metrics(trainer.log()[drawn], batch_with(rollout.log()[drawn])).metrics())
    kl = (rollout * (rollout / trainer).log()).sum().item()
    assert values["mismatch_kl_k1"] == pytest.approx(kl, abs=1e-12) == values["mismatch_kl_k3"]
    assert values["ratio_mean"] == pytest.approx(1.0, abs=1e-12)


def test_splits_by_hand():
    d = torch.tensor([0.0, 0.2, -0.05, 0.0, -0.4], dtype=torch.float64)
    batch = batch_with(torch.full((5,), -1.0), singleton=[True, False, False, True, False], staleness=[0, 0, 2, 2, 2])
    metrics = mismatch_metrics(d - 1.0, batch).metrics()
    values = to_floats(metrics)
    assert values["abs_dlogp_mean"] == pytest.approx(0.65 / 5)
    assert values["abs_dlogp_mean/singleton"] == 0.0
    assert values["abs_dlogp_mean/sampled"] == pytest.approx(0.65 / 3)
    assert values["abs_dlogp_mean/staleness_0"] == pytest.approx(0.1)
    assert values["abs_dlogp_mean/staleness_2"] == pytest.approx(0.15)
    assert values["abs_dlogp_max"] == pytest.approx(0.4)
    assert values["ratio_off_share"] == pytest.approx(2 / 5)
    assert "abs_dlogp_mean/staleness_1" not in values  # no token was one version old
    assert metrics["abs_dlogp_mean/sampled"].count == 3


def test_only_loss_tokens_count_and_no_gradient_flows():
    rng = np.random.default_rng(0)
    m = random_microbatch(rng, [6, 5])
    log_probs = torch.from_numpy(rng.normal(size=m.num_positions)).requires_grad_()
    measured = mismatch_metrics(log_probs, token_batch(m, Denominators(9, 2)))
    expected = np.abs(log_probs.detach().numpy() - m.rollout_logprobs)[m.loss_mask]
    metrics = measured.metrics()
    assert metrics["abs_dlogp_mean"].value == pytest.approx(expected.mean(), abs=1e-12)
    assert metrics["abs_dlogp_mean"].count == metrics["num_loss_tokens"].value == m.loss_mask.sum()
    assert metrics["abs_dlogp_max"].value == pytest.approx(expected.max(), abs=1e-12)


def test_a_nan_is_seen():
    values = to_floats(mismatch_metrics(torch.tensor([float("nan"), -1.0]), batch_with(torch.full((2,), -1.0))).metrics())
    assert np.isnan(values["mismatch_kl_k1"]) and np.isnan(values["abs_dlogp_max"])
