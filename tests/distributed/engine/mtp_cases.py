"""Layers for multi-token prediction on the ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.weight_mapping import ParameterTable
from tests.distributed.engine.cases import Run, Setting, copied, laid_out
from tests.distributed.engine.subject import CONFIGS, weights_of

MODEL = "deepseek_v3_mtp"
MTP = ParameterTable(CONFIGS[MODEL]).mtp_names


@dataclass(frozen=True)
class Stepped:
    """One training step of a model whose layers for multi-token prediction are trained, or are not built. On rank 0 all
    tensors."""

    log_probs: dict[int, np.ndarray]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    for_servers: list[str]


def stepped(rank: int, setting: Setting, mtp: str, optimizer: dict[str, Any] | None = None) -> Stepped:
    """AdamW's epsilon is above the rounding of the gradients: one that is about epsilon may take a step of either size."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, model={"mtp": mtp}, optimizer={"epsilon": 1e-6, **(optimizer or {})})
        log_probs, gradients, metrics = run.log_probs(), run.gradients(), run.step()
        for_servers = [spec.name for spec in run.engine.rollout_tensors().specs]
        assert [name for name, _ in run.engine.rollout_tensors()] == for_servers
        return Stepped(log_probs, gradients, run.weights(), metrics, for_servers)


def losses(rank: int, setting: Setting, count: int) -> list[float]:
    """Of the layer for multi-token prediction, in steps on the same tokens."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, model={"mtp": "trained"})
        return [run.step(number)["mtp_loss_1"] for number in range(count)]


def saved_and_resumed(rank: int, setting: Setting, other: Setting, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Three steps at once; and two, a checkpoint, and the third at another layout."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, model={"mtp": "trained"})
        for number in range(2):
            run.step(number)
        run.engine.save(folder, 2)
        run.step(2)
        uninterrupted = run.weights()
    with laid_out(other) as groups:
        run = Run(groups, other, model={"mtp": "trained"})
        assert run.engine.load(folder) == 2
        run.step(2)
        return uninterrupted, run.weights()


def loaded_back(rank: int, setting: Setting) -> dict[str, Tensor]:
    with laid_out(setting) as groups:
        run = Run(groups, setting, model={"mtp": "trained"})
        run.engine.load_weights(weights_of(MODEL, seed=1))
        return copied(run.engine.hf_tensors())


def nothing_to_train(rank: int, setting: Setting) -> str:
    with laid_out(setting) as groups:
        try:
            Run(groups, setting, model={"mtp": "trained"})
        except UnsupportedModelError as error:
            return str(error)
        return "nothing"
