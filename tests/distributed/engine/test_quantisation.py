"""NVFP4 in the trainer: the same bytes at every layout, straight-through gradients, once a step."""

import numpy as np
import pytest
import torch

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import Setting
from tests.distributed.engine.quantisation_cases import (
    MODEL,
    packed_weights,
    qat_against_loaded_values,
    quantisations_of_a_step,
    quantised_activations,
    refused,
)

ONE = Setting(model=MODEL, layout=Layout(1))
EVERYTHING = Setting(model=MODEL, layout=Layout(4, tp=2, pp=2, ep=2))
EXPERT_SHARDS = Setting(model=MODEL, layout=Layout(4, tp=2, etp=2, ep=2), recompute="full")
LAYOUTS = pytest.mark.parametrize("setting", [EVERYTHING, EXPERT_SHARDS], ids=["tp2 pp2 ep2", "tp2 etp2 ep2 recomputed"])


@LAYOUTS
def test_values_are_those_of_the_full_matrices_and_gradients_go_straight_through(four: RankPool, setting: Setting) -> None:
    """A plain run that was given the values, quantised by the test from full tensors, computes the same to the last bit.

    So ranks quantise their shards to the same values, and nothing but the values differs.
    """
    answers = four.run(qat_against_loaded_values, setting)
    for (quantised, plain), (gradients, expected), stayed in answers:
        assert stayed
        assert quantised.keys() == plain.keys()
        assert all(np.array_equal(quantised[number], plain[number]) for number in plain)
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
    assert answers[0][1][0]


@LAYOUTS
def test_servers_get_the_same_bytes_from_every_layout(four: RankPool, setting: Setting) -> None:
    found, other = four.run(packed_weights, setting)[0], four.run(packed_weights, Setting(model=MODEL, layout=Layout(4)))[0]
    assert list(found) == list(other)
    assert {tensor.dtype for tensor in found.values()} == {torch.uint8, torch.float8_e4m3fn, torch.float32}
    assert all(
        torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in other.items() if tensor.dim()
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in other.items() if not tensor.dim())


def test_weights_are_quantised_once_a_step(four: RankPool) -> None:
    for first, matrices, second in four.run(quantisations_of_a_step, EVERYTHING):
        assert first == second == matrices > 0


def test_quantised_activations_change_the_scores(four: RankPool) -> None:
    for weights_alone, both in four.run(quantised_activations, EVERYTHING):
        distance = max(np.abs(both[number] - weights_alone[number]).max() for number in both if both[number].size)
        assert 1e-3 < distance < 5.0


def test_shards_that_cut_blocks_are_refused(four: RankPool) -> None:
    cut = Setting(model="qwen3_moe", layout=Layout(4))
    assert all("multiple of 16" in text for text in four.run(refused, cut, {"training": "qat", "rollouts": "nvfp4"}))
