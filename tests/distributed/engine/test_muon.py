"""Muon's step is the float64 reference's on the Hugging Face matrices, at every layout; runs repeat and resume.

Not shown: bf16 iterations, GPUs.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.optim import MuonRates, MuonSettings, reference_step
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable
from tests.distributed.engine.cases import LEARNING_RATE, Setting
from tests.distributed.engine.checkpoint_cases import save_and_continue
from tests.distributed.engine.muon_cases import (
    MUON,
    Stepped,
    muon_steps,
    other_optimizer,
    resume,
    state_after_steps,
    step_without_loss,
    steps_without_expert,
)
from tests.distributed.engine.subject import CONFIGS, weights_of

# Of an update, relative to its norm. Against the reference, which starts from the same gradients, what is left is the
# iteration's own rounding and that of weights near 1 (6e-8) next to an update of about .2 * LEARNING_RATE.
REFERENCE = 2e-3
# Between layouts the gradients differ by about 1e-6 relative to their norm, and Newton-Schulz raises that of the smallest
# singular values by up to 3.4445^5 = 485.
LAYOUT = 2e-3

FOUR = {
    "dp4": Setting(layout=Layout(4)),
    "tp2": Setting(layout=Layout(4, tp=2)),
    "tp4, more than query groups": Setting(layout=Layout(4, tp=4)),
    "pp2": Setting(layout=Layout(4, pp=2)),
    "ep2": Setting(layout=Layout(4, ep=2)),
    "tp4 etp2 ep2": Setting(layout=Layout(4, tp=4, etp=2, ep=2)),
    "tp2 pp2 vpp2 ep2": Setting(layout=Layout(4, tp=2, pp=2, vpp=2, ep=2)),
    "cp2 tp2": Setting(layout=Layout(4, tp=2, cp=2)),
    "dense and tied, tp2 pp2": Setting("qwen3", Layout(4, tp=2, pp=2)),
    # Each factor of latent attention by itself: down projections are complete on every tensor-parallel rank, up ones are cut.
    "latent, tp2": Setting("deepseek_v3_moe", Layout(4, tp=2)),
    "latent, ep2": Setting("deepseek_v3_moe", Layout(4, ep=2)),
    "latent, tp2 pp2 ep2": Setting("deepseek_v3_moe", Layout(4, tp=2, pp=2, ep=2)),
    "latent, tp4 etp2 ep2": Setting("deepseek_v3_moe", Layout(4, tp=4, etp=2, ep=2)),
}


@pytest.fixture(scope="module")
def single(one: RankPool):
    @cache
    def of(model: str) -> Stepped:
        return one.run(muon_steps, Setting(model))[0]

    return of


def matrices_of(model: str) -> list[str]:
    return [t.name for p in ParameterTable(CONFIGS[model]).parameters if p.role.has_matrices for t in p.hf]


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor], before: dict[str, Tensor], names: list[str]) -> tuple[float, str]:
    """The largest difference of an update, relative to the update's norm, and whose it is."""
    return max((float((found[n] - wanted[n]).double().norm() / (wanted[n] - before[n]).double().norm()), n) for n in names)


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3", "deepseek_v3_moe"])
def test_two_steps_are_the_references(single, model: str) -> None:
    found, before = single(model), weights_of(model)
    expected = {name: weight.double() for name, weight in before.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for number in range(2):
        clipped = min(1.0, 1.0 / (found.grad_norms[number] + 1e-6))
        for name in matrices_of(model):
            gradient = clipped * found.gradients[number][name].double()
            rates = MuonRates(LEARNING_RATE, 0.1)
            expected[name], momenta[name] = reference_step(expected[name], momenta[name], gradient, MuonSettings(), rates)
        assert (difference := worst(found.weights[number], expected, before, matrices_of(model)))[0] < REFERENCE, difference


@pytest.mark.parametrize("name", FOUR)
def test_every_layout_makes_the_same_update(single, four: RankPool, name: str) -> None:
    setting = FOUR[name]
    wanted, found, before = single(setting.model), four.run(muon_steps, setting)[0], weights_of(setting.model)
    for number in range(2):
        difference = worst(found.weights[number], wanted.weights[number], before, matrices_of(setting.model))
        assert difference[0] < LAYOUT, difference
        rest = set(before) - set(matrices_of(setting.model))
        # AdamW's part: as in test_parity
        assert max(float((found.weights[number][n] - wanted.weights[number][n]).abs().max()) for n in rest) < 0.2 * LEARNING_RATE


@pytest.mark.parametrize("setting", [Setting(), Setting(layout=Layout(4, tp=2, pp=2, ep=2))], ids=["one", "tp2 pp2 ep2"])
def test_an_expert_without_tokens_is_updated_by_its_momentum(one: RankPool, four: RankPool, setting: Setting) -> None:
    found, before = (
        (one if setting.layout.world_size == 1 else four).run(steps_without_expert, setting, 5)[0],
        weights_of("qwen3_moe"),
    )
    names = [name for name in matrices_of("qwen3_moe") if ".experts.5." in name]
    assert len(names) == 6 and all(found.gradients[0][name].any() for name in names)
    clipped = min(1.0, 1.0 / (found.grad_norms[0] + 1e-6))
    for name in names:
        assert not found.gradients[1][name].any()
        gradient, rates = clipped * found.gradients[0][name].double(), MuonRates(LEARNING_RATE, 0.1)
        weight, momentum = reference_step(before[name].double(), torch.zeros_like(gradient), gradient, MuonSettings(), rates)
        weight, _ = reference_step(weight, momentum, torch.zeros_like(gradient), MuonSettings(), rates)
        assert worst({name: found.weights[1][name]}, {name: weight}, before, [name])[0] < REFERENCE
    assert all(torch.isfinite(weight).all() for weight in found.weights[1].values())


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3_moe"])
def test_a_zero_gradient_only_decays(four: RankPool, model: str) -> None:
    weights, grad_norm = four.run(step_without_loss, Setting(model, Layout(4, tp=2, pp=2, ep=2)))[0]
    assert grad_norm == 0
    for name in matrices_of(model):
        wanted = weights_of(model)[name] * (1 - LEARNING_RATE * 0.1)
        assert torch.allclose(weights[name], wanted, rtol=1e-6, atol=0), name


def test_runs_are_equal_to_the_bit(four: RankPool) -> None:
    setting = Setting(layout=Layout(4, tp=2, ep=2))
    first, second = four.run(state_after_steps, setting), four.run(state_after_steps, setting)
    for one_rank, same_rank in zip(first, second, strict=True):
        assert one_rank.keys() == same_rank.keys()
        assert all(torch.equal(tensor, same_rank[name]) for name, tensor in one_rank.items())


def test_momentum_is_the_only_state_and_falls_with_the_replicas(four: RankPool) -> None:
    """Each of the four replicas holds a quarter of the momentum, and there is no second moment of a matrix."""
    parameters = ParameterTable(CONFIGS["qwen3_moe"]).parameters
    names = {parameter.name for parameter in parameters if parameter.role.has_matrices}
    elements = sum(p.mapping.shape[0] * p.mapping.shape[1] for p in parameters if p.role.has_matrices)
    for state in four.run(state_after_steps, Setting(layout=Layout(4))):
        own = {key: tensor.numel() for key, tensor in state.items() if key.split(" ")[0] in names}
        assert not any(key.endswith("exp_avg_sq") for key in own)
        assert sum(size for key, size in own.items() if key.endswith(" exp_avg")) < 0.3 * elements


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_is_uninterrupted(four: RankPool, one: RankPool, tmp_path: Path, dtype: str) -> None:
    setting = Setting(layout=Layout(4, tp=2, pp=2, ep=2), dtype=dtype)
    wanted = four.run(save_and_continue, setting, tmp_path / "step2", {"optimizer": MUON})[0]
    found, loss = four.run(resume, setting, tmp_path / "step2")[0]
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    if dtype == "float32":
        elsewhere = [four.run(resume, Setting(layout=Layout(4, ep=4)), tmp_path / "step2")[0]]
        elsewhere.append(one.run(resume, Setting(), tmp_path / "step2")[0])
        for weights, other_loss in elsewhere:
            assert other_loss == pytest.approx(loss, rel=1e-5)
            # A momentum that is lost or at another parameter moves weights by their full update.
            assert worst(weights, wanted, weights_of("qwen3_moe"), matrices_of("qwen3_moe"))[0] < LAYOUT


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_other_optimizers_checkpoint_is_refused(one: RankPool, tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    (message,) = one.run(other_optimizer, Setting(), tmp_path / "step0", saved_by, loaded_by)
    assert f"optimizer.name = '{saved_by}'" in message and "megatron-to-hf" in message
