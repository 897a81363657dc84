"""Optimizer steps: what may be empty, what is refused, what is repeated to the bit."""

import numpy as np
import pytest
import torch

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import Setting
from tests.distributed.engine.oracle import expected
from tests.distributed.engine.step_cases import (
    broken_weight,
    deterministic_steps,
    gradients_beside_idle_microbatches,
    gradients_with_idle_ranks,
    losses_of_steps,
    reference_policy,
    round_trip,
    step_with_old_logprobs,
    step_without_loss,
    uneven_microbatches,
)  # fmt: skip
from tests.distributed.engine.subject import weights_of
from tests.distributed.engine.test_parity import assert_same_gradients

EVERYTHING = Setting(layout=Layout(4, tp=2, pp=2, ep=2))
REPLICAS = Setting(layout=Layout(4, pp=2, vpp=2, ep=2), recompute="full")


@pytest.mark.parametrize("setting", [EVERYTHING, REPLICAS], ids=["tp2 pp2 ep2", "pp2 vpp2 ep2"])
def test_microbatches_without_loss_tokens_change_nothing(four: RankPool, setting: Setting) -> None:
    assert_same_gradients(four.run(gradients_beside_idle_microbatches, setting)[0], expected(setting.model).gradients)


@pytest.mark.parametrize("setting", [Setting(layout=Layout(4, ep=2)), REPLICAS], ids=["dp4 ep2", "dp2 pp2 vpp2 ep2"])
def test_ranks_without_loss_tokens_change_nothing(four: RankPool, setting: Setting) -> None:
    assert_same_gradients(four.run(gradients_with_idle_ranks, setting)[0], expected(setting.model).gradients)


def test_a_step_without_any_loss_token_moves_nothing(four: RankPool) -> None:
    for metrics, weights_stayed in four.run(step_without_loss, REPLICAS):
        assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and weights_stayed


def test_different_numbers_of_microbatches_are_refused(four: RankPool) -> None:
    for message in four.run(uneven_microbatches, Setting(layout=Layout(4, ep=2))):
        assert "others from 1 to 2" in message


def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(four: RankPool) -> None:
    name = "model.layers.3.mlp.experts.5.down_proj.weight"
    for message, weights_stayed in four.run(broken_weight, EVERYTHING, name):
        assert message.startswith("step 7: gradients are not finite in") and "no update was made" in message
        assert weights_stayed


def test_bfloat16_with_master_weights_learns(four: RankPool) -> None:
    steps = four.run(losses_of_steps, Setting(layout=Layout(4, tp=2, pp=2, ep=2), dtype="bfloat16"), 8)[0]
    assert all(np.isfinite(value) for metrics in steps for value in metrics.values())
    # Updates of 1e-3 are below half a unit of many bf16 weights (2e-3 at .25): without fp32 masters they would be lost.
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


def test_own_time_is_a_part_of_the_step(four: RankPool) -> None:
    for (metrics,) in four.run(losses_of_steps, EVERYTHING, 1):
        assert metrics["own_s"] > 0 and metrics["forward_backward_s"] > 0 and metrics["optimizer_s"] > 0


def test_deterministic_steps_are_equal_to_the_bit(four: RankPool) -> None:
    first, second = four.run(deterministic_steps, EVERYTHING)[0], four.run(deterministic_steps, EVERYTHING)[0]
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_the_reference_is_the_policy_that_was_kept(four: RankPool) -> None:
    for found in four.run(reference_policy, REPLICAS):
        assert np.array_equal(found.reference, found.at_start)
        assert np.array_equal(found.trained_again, found.trained) and found.weights_restored
        assert not np.allclose(found.trained, found.at_start, atol=1e-3)


def test_old_log_probs_reach_the_loss(four: RankPool) -> None:
    unclipped, clipped = (four.run(step_with_old_logprobs, EVERYTHING, offset)[0] for offset in (0.0, 1.0))
    assert unclipped["clip_fraction"] == 0 and clipped["clip_fraction"] > 0.2


@pytest.mark.parametrize(
    "setting",
    [
        EVERYTHING, Setting(layout=Layout(4, tp=4, etp=2, ep=2)), Setting("qwen3_moe_tied", Layout(4, tp=2, pp=2, vpp=2, ep=2)),
        Setting("qwen3", Layout(4, pp=4)),
    ],
    ids=lambda s: f"{s.model} {s.layout}",
)  # fmt: skip
def test_weights_come_back_to_the_bit(four: RankPool, setting: Setting) -> None:
    found = four.run(round_trip, setting)
    assert all(agree for agree, _ in found)
    wanted = weights_of(setting.model)
    assert found[0][1].keys() == wanted.keys() and not any(tensors for _, tensors in found[1:])
    assert all(torch.equal(found[0][1][name], tensor) for name, tensor in wanted.items())
