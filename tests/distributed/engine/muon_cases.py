"""Steps of Muon on the ranks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.engine.checkpoint import EngineCheckpointError
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.objective import Denominators
from tests.distributed.engine.cases import Run, Setting, laid_out
from tests.distributed.engine.step_cases import without_loss

Weights = dict[str, Tensor]
MUON: dict[str, Any] = {"name": "muon", "weight_decay": 0.1, "epsilon": 1e-6, "muon": {"round_mib": 1}}


@dataclass(frozen=True)
class Stepped:
    """Of two steps, on rank 0: the gradient before each, unclipped, the weights after each, and the gradients' norms."""

    gradients: list[Weights]
    weights: list[Weights]
    grad_norms: list[float]


def muon_steps(rank: int, setting: Setting) -> Stepped:
    with laid_out(setting) as groups:
        run = Run(groups, setting, optimizer=MUON)
        found = Stepped([], [], [])
        for number in range(2):
            found.gradients.append(run.gradients())
            found.grad_norms.append(run.step(number)["grad_norm"])
            found.weights.append(run.weights())
        return found


def steps_without_expert(rank: int, setting: Setting, expert: int) -> Stepped:
    """The second step sends no token to this expert of any layer."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, optimizer=MUON)
        found = Stepped([], [], [])
        for number in range(2):
            found.gradients.append(run.gradients())
            found.grad_norms.append(run.step(number)["grad_norm"])
            found.weights.append(run.weights())
            run.microbatches = [avoiding(microbatch, expert) for microbatch in run.microbatches]
        return found


def avoiding(microbatch: Microbatch, expert: int) -> Microbatch:
    """Tokens of this expert go to the first one that they do not go to yet."""
    recorded = microbatch.routed_experts[microbatch.route_mask]
    for row in recorded.reshape(-1, recorded.shape[-1]):
        row[row == expert] = next(other for other in range(recorded.shape[-1] + 1) if other != expert and other not in row)
    routes = microbatch.routed_experts.copy()
    routes[microbatch.route_mask] = recorded
    return replace(microbatch, routed_experts=routes)


def step_without_loss(rank: int, setting: Setting) -> tuple[Weights, float]:
    """The weights after a step without a loss token on any rank, and the gradient's norm."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, optimizer=MUON)
        run.microbatches = [without_loss(m) for m in run.microbatches]
        run.denominators = Denominators(tokens=1, sequences=1)
        grad_norm = run.step()["grad_norm"]
        return run.weights(), grad_norm


def state_after_steps(rank: int, setting: Setting) -> Weights:
    """All that two steps change on this rank."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, optimizer=MUON)
        for number in range(2):
            run.step(number)
        return {name: tensor.clone() for name, tensor in run.engine.state()}


def resume(rank: int, setting: Setting, folder: Path) -> tuple[Weights, float]:
    """A fresh engine, the checkpoint, two more steps: the weights and the last loss."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, optimizer=MUON)
        losses = [run.step(number)["loss"] for number in range(run.engine.load(folder), 4)]
        return run.weights(), losses[-1]


def other_optimizer(rank: int, setting: Setting, folder: Path, saved_by: str, loaded_by: str) -> str:
    """The message when one optimizer loads the other's checkpoint."""
    with laid_out(setting) as groups:
        Run(groups, setting, optimizer={"name": saved_by}).engine.save(folder, 0)
        try:
            Run(groups, setting, optimizer={"name": loaded_by}).engine.load(folder)
        except EngineCheckpointError as error:
            return str(error)
        return "nothing"


@dataclass(frozen=True)
class Clipped:
    largest_logits: list[float]
    """Of two steps on the same tokens, at a rate that moves nothing: what the second one measures, the first one's clip has
    made."""
    weights: Weights


def clipped(rank: int, setting: Setting, threshold: float) -> Clipped:
    with laid_out(setting) as groups:
        run = Run(groups, setting, optimizer={"name": "muon", "muon": {"qk_clip": threshold}})
        logits = []
        for number in range(2):
            metrics = run.engine.train_step(run.microbatches, run.loss, run.denominators, step=number, learning_rate=1e-30)
            logits.append(metrics["max_attention_logit"].value)
        return Clipped(logits, run.weights())


def refused_clip(rank: int, setting: Setting) -> str:
    with laid_out(setting) as groups:
        try:
            Run(groups, setting, optimizer={"name": "muon", "muon": {"qk_clip": 10.0}})
        except UnsupportedModelError as error:
            return str(error)
        return "nothing"
