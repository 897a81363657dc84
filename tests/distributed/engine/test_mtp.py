"""Layers for multi-token prediction: trained by their own loss without an effect on the policy, at every layout, with
routes replayed.

Their loss and gradients are those of transformers' decoder layer in float64. Not shown: several such layers, GPUs.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable
from tests.distributed.engine.cases import Setting
from tests.distributed.engine.mtp_cases import (
    MODEL,
    MTP,
    Stepped,
    loaded_back,
    losses,
    nothing_to_train,
    saved_and_resumed,
    stepped,
)
from tests.distributed.engine.mtp_oracle import expected_ahead
from tests.distributed.engine.subject import CONFIGS, weights_of
from tests.distributed.engine.test_parity import (
    GRADIENT,
    STEP,
    assert_same_gradients,
    assert_same_scores,
    merged,
    relative_differences,
)

FOUR = {
    "pp2": Setting(MODEL, Layout(4, pp=2)),
    "tp2 pp2 ep2": Setting(MODEL, Layout(4, tp=2, pp=2, ep=2)),
    "pp2 vpp2 ep2, full recompute": Setting(MODEL, Layout(4, pp=2, vpp=2, ep=2), recompute="full"),
    "tp4 etp2 ep2, selective recompute": Setting(MODEL, Layout(4, tp=4, etp=2, ep=2), recompute="selective"),
    "cp2 ep2": Setting(MODEL, Layout(4, cp=2, ep=2)),
}
LAYER = f"model.layers.{CONFIGS[MODEL]['num_hidden_layers']}."


@pytest.fixture(scope="module")
def single(one: RankPool):
    @cache
    def of(mtp: str) -> Stepped:
        return one.run(stepped, Setting(MODEL), mtp)[0]

    return of


def of_mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name in MTP}


def of_policy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in MTP}


@pytest.mark.parametrize("name", FOUR)
def test_the_policy_is_unchanged(single, four: RankPool, name: str) -> None:
    found, wanted = four.run(stepped, FOUR[name], "trained"), four.run(stepped, FOUR[name], "carried")
    for with_mtp, without in zip(found, wanted, strict=True):
        assert with_mtp.log_probs.keys() == without.log_probs.keys()
        assert all((with_mtp.log_probs[number] == values).all() for number, values in without.log_probs.items())
        # The norm too: it decides how far a step is clipped.
        assert all(with_mtp.metrics[key] == pytest.approx(without.metrics[key], rel=1e-6) for key in ("loss", "grad_norm"))
    trained, carried = found[0], wanted[0]
    assert not of_mtp(carried.weights) and trained.for_servers == carried.for_servers == list(carried.weights)
    # The sums are the same ones; a buffer that is cut over ranks elsewhere may take them in another order.
    assert max(relative_differences(of_policy(trained.gradients), carried.gradients).values()) < 1e-6
    assert max(float((trained.weights[key] - weight).abs().max()) for key, weight in carried.weights.items()) < STEP


@pytest.mark.parametrize("name", FOUR)
def test_every_layout_trains_the_same_layer(single, four: RankPool, name: str) -> None:
    wanted, found = single("trained"), four.run(stepped, FOUR[name], "trained")
    assert_same_scores(merged([part.log_probs for part in found]), wanted.log_probs)
    assert_same_gradients(found[0].gradients, wanted.gradients)
    assert found[3].metrics["mtp_loss_1"] == pytest.approx(wanted.metrics["mtp_loss_1"], rel=1e-5)
    assert max(float((found[0].weights[key] - weight).abs().max()) for key, weight in wanted.weights.items()) < STEP


def test_loss_and_gradients_are_those_of_transformers_layer(single) -> None:
    loss, gradients = expected_ahead(MODEL, LAYER)
    found = single("trained")
    assert found.metrics["mtp_loss_1"] == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == of_mtp(found.gradients).keys()
    # The selection bias has no gradient; each other tensor but that of an expert without tokens has one.
    assert sum(bool(gradient.any()) for gradient in gradients.values()) > 30
    worst = max((d, name) for name, d in relative_differences(of_mtp(found.gradients), gradients).items())
    assert worst[0] < GRADIENT, worst
    moved = {name for name, weight in weights_of(MODEL).items() if name in MTP and not torch.equal(weight, found.weights[name])}
    assert moved == {name for name, gradient in gradients.items() if gradient.any()}


def test_it_learns_and_checkpoints_hold_it(four: RankPool, tmp_path: Path) -> None:
    setting, other = FOUR["tp2 pp2 ep2"], Setting(MODEL, Layout(4, ep=4))
    found = four.run(losses, setting, 8)
    assert all(of_rank[-1] < 0.9 * of_rank[0] for of_rank in found)
    uninterrupted, resumed = four.run(saved_and_resumed, setting, other, tmp_path / "step2")[0]
    assert uninterrupted.keys() == resumed.keys() == weights_of(MODEL).keys()
    assert max(float((resumed[key] - weight).abs().max()) for key, weight in uninterrupted.items()) < STEP


def test_weights_come_back_to_the_bit(four: RankPool) -> None:
    wanted, found = weights_of(MODEL, seed=1), four.run(loaded_back, FOUR["tp2 pp2 ep2"])[0]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_muon_trains_it_too(one: RankPool, four: RankPool) -> None:
    muon = {"name": "muon", "muon": {"round_mib": 1}}
    wanted, found = (
        one.run(stepped, Setting(MODEL), "trained", muon)[0],
        four.run(stepped, FOUR["tp2 pp2 ep2"], "trained", muon)[0],
    )
    before = weights_of(MODEL)
    matrices = {
        t.name for p in ParameterTable(CONFIGS[MODEL], with_mtp=True).parameters if p.role.has_matrices for t in p.hf
    } & MTP
    moved = [name for name in matrices if not torch.equal(wanted.weights[name], before[name])]
    assert LAYER + "eh_proj.weight" in moved
    for name in moved:  # tolerance: as in test_muon
        assert (found.weights[name] - wanted.weights[name]).norm() < 2e-3 * (wanted.weights[name] - before[name]).norm(), name


def test_a_model_without_such_layers_is_refused(one: RankPool) -> None:
    (message,) = one.run(nothing_to_train, Setting("deepseek_v3_moe"))
    assert "no layer for multi-token prediction" in message and "leave model.mtp out" in message
