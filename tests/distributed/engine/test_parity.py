"""The same step is the same on every layout, and is what Hugging Face's own model gives.

One process against Hugging Face in float64; four processes in every layout against the one. Each layout packs and splits the nine
sequences differently, over one to four data-parallel ranks. Not shown: bf16, GPUs.
"""

from functools import cache

import numpy as np
import pytest
from torch import Tensor

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import LEARNING_RATE, Evaluation, Setting, evaluate
from tests.distributed.engine.oracle import expected
from tests.distributed.engine.step_cases import gradients_packed_backwards
from tests.distributed.engine.subject import MODELS

# fp32: logits of size 10 after four layers carry some 1e-6 each.
LOG_PROB = 2e-5
# Relative to the gradient's own norm.
GRADIENT = 1e-4
# AdamW's first step is the sign of a gradient, but for those as small as epsilon: there two layouts may differ by a share of
# the rate.
STEP = 0.1 * LEARNING_RATE

FOUR = {
    "dp4": Setting(layout=Layout(4)),
    "tp2": Setting(layout=Layout(4, tp=2)),
    "tp4": Setting(layout=Layout(4, tp=4)),
    "pp2": Setting(layout=Layout(4, pp=2)),
    "pp4": Setting(layout=Layout(4, pp=4)),
    "pp2 vpp2": Setting(layout=Layout(4, pp=2, vpp=2)),
    "ep2": Setting(layout=Layout(4, ep=2)),
    "ep4": Setting(layout=Layout(4, ep=4)),
    "tp2 ep2": Setting(layout=Layout(4, tp=2, ep=2)),
    "cp4": Setting(layout=Layout(4, cp=4)),
    "cp2 ep2": Setting(layout=Layout(4, cp=2, ep=2)),
    "tp2 cp2 ep4": Setting(layout=Layout(4, tp=2, cp=2, ep=4)),
    "cp2 pp2 ep2, full recompute": Setting(layout=Layout(4, cp=2, pp=2, ep=2), recompute="full"),
    "tp2 etp2 ep2": Setting(layout=Layout(4, tp=2, etp=2, ep=2)),
    "tp4 etp2 ep2": Setting(layout=Layout(4, tp=4, etp=2, ep=2)),
    "pp2 ep2": Setting(layout=Layout(4, pp=2, ep=2)),
    "tp2 pp2 ep2": Setting(layout=Layout(4, tp=2, pp=2, ep=2)),
    "tp2 pp2 vpp2 ep2, full recompute": Setting(layout=Layout(4, tp=2, pp=2, vpp=2, ep=2), recompute="full"),
    "pp2 ep2, full recompute": Setting(layout=Layout(4, pp=2, ep=2), recompute="full"),
    "pp4, selective recompute": Setting(layout=Layout(4, pp=4), recompute="selective"),
    "ep4, one sequence a microbatch": Setting(layout=Layout(4, ep=4), max_tokens=19),
    "tied, pp2": Setting("qwen3_moe_tied", Layout(4, pp=2)),
    "tied, tp2 pp2 vpp2 ep2": Setting("qwen3_moe_tied", Layout(4, tp=2, pp=2, vpp=2, ep=2)),
    "tied, tp2 ep2": Setting("qwen3_moe_tied", Layout(4, tp=2, ep=2)),
    "dense and tied, tp2 pp2": Setting("qwen3", Layout(4, tp=2, pp=2)),
    "dense and tied, tp4 without sequence parallelism": Setting("qwen3", Layout(4, tp=4), sequence_parallel=False),
    "llama, tp2 pp2": Setting("llama", Layout(4, tp=2, pp=2)),
    # Latent attention, shared experts, a leading dense layer, a selection bias.
    "deepseek, pp4": Setting("deepseek_v3_moe", Layout(4, pp=4)),
    "deepseek, tp2 pp2 ep2": Setting("deepseek_v3_moe", Layout(4, tp=2, pp=2, ep=2)),
    "deepseek, tp2 cp2 ep2, full recompute": Setting("deepseek_v3_moe", Layout(4, tp=2, cp=2, ep=2), recompute="full"),
    "deepseek, tp4 etp2 ep2": Setting("deepseek_v3_moe", Layout(4, tp=4, etp=2, ep=2)),
}


def merged(parts: list[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """Of all ranks; ranks of one replica say the same."""
    found: dict[int, np.ndarray] = {}
    for part in parts:
        for number, values in part.items():
            assert np.array_equal(found.setdefault(number, values), values)
    return found


def assert_same_scores(found: dict[int, np.ndarray], wanted: dict[int, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for number, values in wanted.items():
        np.testing.assert_allclose(found[number], values, rtol=0, atol=LOG_PROB, err_msg=f"sequence {number}")


def relative_differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """By name, relative to the norm; an expert without tokens has gradient 0 in both."""
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - w).double().norm() / w.double().norm().clamp(min=1e-9)) for name, w in wanted.items()}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    worst = max((d, name) for name, d in relative_differences(found, wanted).items())
    assert worst[0] < GRADIENT, worst


@pytest.fixture(scope="module")
def single(one: RankPool):
    @cache
    def of(model: str) -> Evaluation:
        return one.run(evaluate, Setting(model))[0]

    return of


@pytest.mark.parametrize("model", [*MODELS, "deepseek_v3_moe"])
def test_one_process_is_hugging_face(single, model: str) -> None:
    found, wanted = single(model), expected(model)
    assert_same_scores(found.log_probs, wanted.log_probs)
    assert_same_scores(found.entropies, wanted.entropies)
    assert_same_gradients(found.gradients, wanted.gradients)
    assert found.metrics["loss"] == pytest.approx(wanted.loss, abs=1e-5)


@pytest.mark.parametrize("name", FOUR)
def test_every_layout_is_one_process(single, four: RankPool, name: str) -> None:
    setting = FOUR[name]
    wanted, found = single(setting.model), four.run(evaluate, setting)
    assert_same_scores(merged([part.log_probs for part in found]), wanted.log_probs)
    assert_same_scores(merged([part.entropies for part in found]), wanted.entropies)
    assert_same_gradients(found[0].gradients, wanted.gradients)
    for key in ("loss", "grad_norm", "singleton_share", "mismatch_kl_k1"):
        assert found[3].metrics[key] == pytest.approx(wanted.metrics[key], rel=1e-5, abs=1e-6), key
    moved = max(float((found[0].weights[key] - weight).abs().max()) for key, weight in wanted.weights.items())
    assert moved < STEP


def test_the_order_of_packing_changes_nothing(single, one: RankPool) -> None:
    backwards = one.run(gradients_packed_backwards, Setting(max_tokens=25))[0]
    assert_same_gradients(backwards, single("qwen3_moe").gradients)
