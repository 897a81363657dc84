"""What the ranks run: each function is called on every rank of a pool, and returns plain values."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine import build_engine
from megatron_rl.engine.groups import ParallelGroups, parallel_layout
from megatron_rl.topology import Layout
from tests.distributed.engine.subject import (
    CONFIGS,
    MAX_TOKENS,
    config_of,
    denominators_of,
    loss_of,
    microbatches_of,
    options_of,
    rollouts_of,
    weights_of,
)  # fmt: skip

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """One way to run the same step."""

    model: str = "qwen3_moe"
    layout: Layout = field(default_factory=Layout)
    recompute: str = "none"
    sequence_parallel: bool | None = None
    max_tokens: int = MAX_TOKENS
    multiple_of: int = 1
    routing_replay: bool = True
    dtype: str = "float32"

    def config(self, **sections: dict[str, Any]) -> Config:
        return config_of(
            self.model,
            self.layout,
            recompute=self.recompute,
            dtype=self.dtype,
            sequence_parallel=self.sequence_parallel,
            **sections,
        )


@dataclass(frozen=True)
class Evaluation:
    """What one rank knows of a step: the scores of its own sequences; on rank 0 the full gradients and the weights after the
    step."""

    log_probs: dict[int, np.ndarray]  # by sequence, of its loss tokens
    entropies: dict[int, np.ndarray]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, float]


_ENGINES: list[Any] = []
"""Of the block that is open."""


@contextmanager
def laid_out(setting: Setting) -> Iterator[ParallelGroups]:
    """The groups of a setting; the engines built within are let go at the end."""
    with parallel_layout(setting.layout) as groups:
        try:
            yield groups
        finally:
            while _ENGINES:
                _ENGINES.pop().close()


class Run:
    """An engine with its microbatches, inside of a layout's groups."""

    def __init__(self, groups: ParallelGroups, setting: Setting, **sections: dict[str, Any]) -> None:
        self.groups = groups
        self.config = setting.config(**sections)
        self.engine = build_engine(self.config, groups, CONFIGS[setting.model], weights_of(setting.model))
        _ENGINES.append(self.engine)
        self.members = rollouts_of(setting.model)
        self.loss, self.denominators = loss_of(self.config), denominators_of(self.members)
        options = options_of(
            setting.model, moe_layers=self.engine.moe_layers, sequence_parallel=self.config.sequence_parallel,
            routing_replay=setting.routing_replay,
        )  # fmt: skip
        self.microbatches = microbatches_of(
            self.members,
            setting.layout,
            groups.coords,
            options,
            max_tokens=setting.max_tokens,
            multiple_of=setting.multiple_of,
        )

    def step(self, number: int = 0) -> dict[str, float]:
        metrics = self.engine.train_step(
            self.microbatches, self.loss, self.denominators, step=number, learning_rate=LEARNING_RATE
        )
        return {name: metric.value for name, metric in metrics.items() if metric.count}

    def gradients(self) -> dict[str, Tensor]:
        from megatron_rl.engine.diagnostics import full_gradients

        return copied(full_gradients(self.engine, self.microbatches, self.loss, self.denominators))

    def log_probs(self) -> dict[int, np.ndarray]:
        return by_sequence(self.microbatches, [s.log_probs for s in self.engine.score(self.microbatches)])

    def weights(self) -> dict[str, Tensor]:
        return copied(self.engine.hf_tensors())


def copied(tensors: Any) -> dict[str, Tensor]:
    """On rank 0; {} elsewhere, after having taken part."""
    return {name: tensor.clone() for name, tensor in tensors if tensor is not None}


def by_sequence(microbatches: list, values: list[np.ndarray]) -> dict[int, np.ndarray]:
    """Values at each sequence's loss tokens."""
    return {
        int(number): of_one[microbatch.loss_mask & (microbatch.sequence == number)]
        for microbatch, of_one in zip(microbatches, values, strict=True)
        for number in np.unique(microbatch.sequence[microbatch.sequence >= 0])
    }


def evaluate(rank: int, setting: Setting) -> Evaluation:
    """Scores, gradients, and one optimizer step. Epsilon is above the rounding of the gradients: one of about epsilon may take a
    step of either size."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, optimizer={"epsilon": 1e-6})
        scores = run.engine.score(run.microbatches)
        gradients = run.gradients()
        metrics = run.step()
        return Evaluation(
            by_sequence(run.microbatches, [s.log_probs for s in scores]), by_sequence(run.microbatches,
            [s.entropies for s in scores]),
            gradients, run.weights(), metrics,
        )  # fmt: skip
