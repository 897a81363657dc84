"""What the ranks of a check run: each function is called on every rank of a pool and returns plain values.

Whatever loads Megatron is imported inside functions, because the process that sends these functions to the ranks has no stand-in
for CUDA.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from megatron_rl.batching import Microbatch, Spool, microbatches_for
from megatron_rl.config import Config
from megatron_rl.engine import build_engine
from megatron_rl.engine.groups import ParallelGroups, parallel_layout, set_determinism
from megatron_rl.engine.weight_export import WeightExport
from megatron_rl.inference.registry import engine_of
from megatron_rl.inference.sender import ServerAddress
from megatron_rl.objective import Denominators, PolicyLoss, SupervisedLoss
from megatron_rl.preflight.faults import injected_fault
from megatron_rl.preflight.subject import PLAIN, REPLAYED, Scores, Subject
from megatron_rl.records import StepPlan
from megatron_rl.weight_sync import update_servers

if TYPE_CHECKING:
    from megatron_rl.engine.engine import Engine

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Forward:
    """One rank's part of a scored plan."""

    log_probs: Scores
    entropies: Scores
    gradients: dict[str, Tensor]
    """Of the supervised loss; on rank 0."""


@dataclass(frozen=True)
class Step:
    """One rank's part of a scored plan and of one update."""

    log_probs: Scores
    loss: float
    gradients: dict[str, Tensor]
    """Of the run's own objective; on rank 0, as the weights."""
    weights: dict[str, Tensor]
    """After one optimizer step."""


@dataclass(frozen=True)
class Replays:
    """Log-probs of the same sequences, scored in several ways. `wrong_experts` is None for a dense model."""

    right: Scores
    wrong_experts: Scores | None
    without_temperature: Scores
    without_keep_sets: Scores


class Run:
    """The policy on this rank, and its part of a step plan."""

    def __init__(self, subject: Subject, config: Config, groups: ParallelGroups) -> None:
        from megatron_rl.trainer.model_folder import open_model

        self._spool, self._groups, self.config = Spool(subject.folder), groups, config
        model = open_model(subject.model_folder)
        self.engine: Engine = build_engine(config, groups, model.config, model)

    def plan(self, name: str) -> StepPlan:
        """The step plan of this name."""
        return self._spool.read_plan(name)

    def microbatches(self, name: str, **switches: Any) -> list[Microbatch]:
        """This rank's microbatches of a step plan.

        Args:
            name: Name of the step plan.
            **switches: Fields of AssemblyOptions that differ from the run's.

        Returns:
            The microbatches.
        """
        from megatron_rl.trainer.model_folder import assembly_options

        options = replace(assembly_options(self.config, self.engine), **switches)
        return microbatches_for(self.plan(name), self._spool, self._groups.layout, self._groups.coords, options)


@contextmanager
def opened(subject: Subject, config: Config, fault: str | None) -> Iterator[Run]:
    """A new engine with the layout and determinism of the configuration."""
    set_determinism(config.run.deterministic)
    with injected_fault(fault), parallel_layout(config.parallel_layout) as groups:
        run = Run(subject, config, groups)
        with closing(run.engine):
            yield run


def forward(_rank: int, subject: Subject, config: Config, fault: str | None) -> Forward:
    """Scores the plain plan with the experts that the routers choose, and computes the gradients of the supervised loss."""
    from megatron_rl.engine.diagnostics import full_gradients

    with opened(subject, config, fault) as run:
        microbatches = run.microbatches(subject.plans[PLAIN], routing_replay=False)
        scores = run.engine.score(microbatches)
        denominators = Denominators.of(run.plan(subject.plans[PLAIN]))
        gradients = copied(full_gradients(run.engine, microbatches, SupervisedLoss(), denominators))
        log_probs, entropies = (
            by_sequence(microbatches, [getattr(s, name) for s in scores]) for name in ("log_probs", "entropies")
        )
        return Forward(log_probs, entropies, gradients)


def step(_rank: int, subject: Subject, config: Config, fault: str | None) -> Step:
    """Scores the replayed plan, computes the gradients of the run's objective and makes one optimizer step."""
    from megatron_rl.engine.diagnostics import full_gradients

    with opened(subject, config, fault) as run:
        microbatches = run.microbatches(subject.plans[REPLAYED])
        loss, denominators = PolicyLoss(config.objective), Denominators.of(run.plan(subject.plans[REPLAYED]))
        log_probs = by_sequence(microbatches, [s.log_probs for s in run.engine.score(microbatches)])
        gradients = copied(full_gradients(run.engine, microbatches, loss, denominators))
        metrics = run.engine.train_step(microbatches, loss, denominators, step=0, learning_rate=LEARNING_RATE)
        return Step(log_probs, metrics["loss"].value, gradients, copied(run.engine.hf_tensors()))


def replays(_rank: int, subject: Subject, config: Config, fault: str | None) -> Replays:
    """Scores the replayed plan with all replays, and with one of them missing or wrong at a time."""
    with opened(subject, config, fault) as run:
        moe = run.engine.table.architecture.moe
        recorded = run.microbatches(subject.plans[REPLAYED])

        def scored(microbatches: Sequence[Microbatch]) -> Scores:
            return by_sequence(microbatches, [s.log_probs for s in run.engine.score(microbatches)])

        return Replays(
            right=scored(recorded),
            wrong_experts=scored([_other_experts(m, moe.num_experts) for m in recorded]) if moe else None,
            without_temperature=scored([replace(m, temperature=np.ones_like(m.temperature)) for m in recorded]),
            without_keep_sets=scored(run.microbatches(subject.plans[REPLAYED], keep_set_replay=False)),
        )


def loaded_weights(_rank: int, subject: Subject, config: Config, fault: str | None) -> dict[str, Tensor]:
    """The full weights, gathered to rank 0 after each rank has loaded its shards."""
    with opened(subject, config, fault) as run:
        return copied(run.engine.hf_tensors())


def scores_of(_rank: int, subject: Subject, config: Config, fault: str | None, plan: str) -> Scores:
    """Log-probs of the loss tokens of a step plan."""
    with opened(subject, config, fault) as run:
        microbatches = run.microbatches(plan)
        return by_sequence(microbatches, [s.log_probs for s in run.engine.score(microbatches)])


def publish(rank: int, subject: Subject, config: Config, fault: str | None, url: str, key: str, version: int) -> dict[str, str]:
    """Gathers the weights and sends them from rank 0 to the server. Returns the failed server's address and reason on rank 0."""
    from megatron_rl.trainer.publisher import PolicySource

    with opened(subject, config, fault) as run:
        source = PolicySource(run.engine)
        if rank != 0:
            for _ in source:
                pass
            return {}
        engine = engine_of(config)
        sender = engine.weight_sender(
            "gloo", config.servers.host, bucket_bytes=config.weight_sync.bucket_mib << 20, timeout_s=60.0
        )
        try:
            return dict(update_servers(engine, sender, [ServerAddress(url, url)], source, version, key=key).failed)
        finally:
            sender.close()


def copied(tensors: WeightExport) -> dict[str, Tensor]:
    """Copies of the gathered tensors on rank 0; {} on other ranks, which have to take part."""
    return {name: tensor.clone() for name, tensor in tensors if tensor is not None}


def by_sequence(microbatches: Sequence[Microbatch], values: Sequence[np.ndarray]) -> Scores:
    """Values of the loss tokens by sequence; sequences without loss tokens are left out."""
    return {
        int(number): of_one[microbatch.loss_mask & (microbatch.sequence == number)]
        for microbatch, of_one in zip(microbatches, values, strict=True)
        for number in np.unique(microbatch.sequence[microbatch.loss_mask])
    }


def _other_experts(microbatch: Microbatch, num_experts: int) -> Microbatch:
    """Each recorded expert replaced by the next one."""
    assert microbatch.routed_experts is not None
    assert microbatch.route_mask is not None
    moved = (microbatch.routed_experts.astype(np.int64) + 1) % num_experts
    experts = np.where(microbatch.route_mask[:, None, None], moved, microbatch.routed_experts)
    return replace(microbatch, routed_experts=experts.astype(microbatch.routed_experts.dtype))
