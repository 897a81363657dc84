"""A recorded step scored in several ways, on one rank.

`python -m megatron_rl.attribution.ranks RUN_DIR SCRATCH_DIR`.

SCRATCH_DIR contains config.toml and job.json. Rank 0 writes scores.safetensors, for each scoring f32 [M] over the step's loss
tokens, and outcome.json. Nothing of the run is written.
"""

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from megatron_rl.attribution.scoring import JOB, OUTCOME, SCORES, Scoring, ScoringJob, ScoringOutcome
from megatron_rl.batching import Microbatch, Spool, microbatches_for
from megatron_rl.config import RunFolder
from megatron_rl.conversion import HfCheckpoint
from megatron_rl.engine.diagnostics import altered_weights, full_gradients, local_gradients, with_dropout
from megatron_rl.engine.parameters import Weights
from megatron_rl.metrics import read_rows
from megatron_rl.objective import Denominators, SupervisedLoss
from megatron_rl.preflight.faults import FAULTS_OF_CONSTRUCTION, injected_fault
from megatron_rl.preflight.ranks import by_sequence
from megatron_rl.processes import ignore_sigterm
from megatron_rl.records import StepPlan, write_scores
from megatron_rl.trainer.loop import Trainer
from megatron_rl.trainer.rank import TrainerRank
from megatron_rl.trainer.ranks import broadcast_object, gather_object, rendezvous_in
from megatron_rl.trainer.saving import save_checkpoint, write_policy
from megatron_rl.weight_mapping import HeldParameter
from megatron_rl.weight_mapping.param_mappings import GateUpMapping
from megatron_rl.wire.control import decode, encode

OF_WEIGHTS = ("loss", "grad_norm", "abs_dlogp_mean")
"""Metrics that tell whether a step trained again came out as recorded; unlike others they do not depend on the layout."""
SAME_METRIC = 1e-3
"""Relative. A run that is not deterministic does not come out the same to the bit."""
SAME_GRADIENT = 1e-3
"""Relative difference of sums and norms; where a sum over ranks is missing they differ by some tenths."""


class StepScorer:
    """Scores one step's rollouts on the ranks of `rank`'s world; every method is a collective.

    versions: the weights of the versions that are known, that of the step's own among them.
    """

    def __init__(self, rank: TrainerRank, plan: StepPlan, versions: dict[int, Weights]) -> None:
        self._rank, self._plan, self._versions = rank, plan, versions

    def score(self, scoring: Scoring) -> np.ndarray | None:
        """f32 [M] on rank 0: log-probs of the loss tokens in the plan's order.

        NaN where the weights that sampled one are not known.
        """
        batch = [self._changed(m, scoring) for m in self._microbatches(scoring)]
        needed = self._versions if scoring.weights == "sampled" else {self._plan.step: self._versions[self._plan.step]}
        found = [np.full(m.num_positions, np.nan, dtype=np.float32) for m in batch]
        for version, weights in sorted(needed.items()):
            for values, microbatch, scores in zip(found, batch, self._pass(batch, weights, scoring), strict=True):
                here = scoring.weights == "step" or self._plan.step - microbatch.staleness == version
                np.copyto(values, scores, where=here)
        return self._over_ranks(batch, found)

    def recorded(self) -> np.ndarray | None:
        """f32 [M] on rank 0: the log-probs of the records, in the same order."""
        batch = self._microbatches(Scoring(routing_replay=False, keep_set_replay=False))
        return self._over_ranks(batch, [m.rollout_logprobs for m in batch])

    def unequal_gradients(self) -> tuple[tuple[str, ...], int]:
        """On rank 0: parameters whose gradients differ between ranks that hold the same part, and how many were compared."""
        batch = self._microbatches(Scoring(routing_replay=True, keep_set_replay=True))
        full_gradients(self._rank.engine, batch, SupervisedLoss(), Denominators.of(self._plan))
        own = {
            (held.parameter.name, held.shard_rank): (float(gradient.double().sum()), float(gradient.double().norm()))
            for held, gradient in local_gradients(self._rank.engine)
        }
        return _differing(gather_object(own) or [])

    def _microbatches(self, scoring: Scoring) -> list[Microbatch]:
        r = self._rank
        options = replace(
            r.options,
            routing_replay=scoring.routing_replay,
            keep_set_replay=scoring.keep_set_replay,
            route_shift=scoring.route_shift,
        )
        return microbatches_for(self._plan, r.spool, r.groups.layout, r.groups.coords, options)

    def _changed(self, microbatch: Microbatch, scoring: Scoring) -> Microbatch:
        if scoring.temperature == "laid_out":
            return microbatch
        value = 1.0 if scoring.temperature == "one" else self._recorded_temperatures[microbatch.sequence]
        return replace(microbatch, temperature=np.where(microbatch.loss_mask, value, 1.0).astype(np.float32))

    @cached_property
    def _recorded_temperatures(self) -> np.ndarray:
        """f64 [entries], from the records themselves."""
        spool, entries = self._rank.spool, self._plan.entries
        return np.array([spool.payload(e.file).rollout(e.index, ()).sampling.temperature for e in entries])

    def _pass(self, batch: Sequence[Microbatch], weights: Weights, scoring: Scoring) -> list[np.ndarray]:
        engine = self._rank.engine
        with engine.using_weights(weights):
            swapped = altered_weights(engine, exchanged_gate_up) if scoring.gate_up_swapped else None
            with (
                engine.using_weights(swapped) if swapped else nullcontext(),
                with_dropout(engine, scoring.dropout) if scoring.dropout else nullcontext(),
            ):
                return [scores.log_probs for scores in engine.score(batch)]

    def _over_ranks(self, batch: Sequence[Microbatch], values: Sequence[np.ndarray]) -> np.ndarray | None:
        """Values at the loss tokens, of all data-parallel ranks, on rank 0."""
        parts = gather_object(by_sequence(batch, values))
        if parts is None:
            return None
        of_entry = {number: found for part in parts for number, found in part.items()}  # ranks of one replica have the same
        return np.concatenate([np.zeros(0, dtype=np.float32), *(of_entry[number] for number in sorted(of_entry))])


def exchanged_gate_up(held: HeldParameter, tensor: Tensor) -> Tensor:
    """A rank's part of gate and up holds as many rows of the one as of the other."""
    if not isinstance(held.parameter.mapping, GateUpMapping):
        return tensor
    half = len(tensor) // 2
    return tensor.roll(half, dims=0)


def attribute(run: RunFolder, scratch: RunFolder) -> None:
    """Scores a step as the job in `scratch` asks; called on every rank."""
    job = decode((scratch.path / JOB).read_bytes(), ScoringJob)
    with injected_fault(job.fault if job.fault in FAULTS_OF_CONSTRUCTION else None):
        config = scratch.config()
        trainer = Trainer(run, config, rendezvous_in(scratch.path, config.layout.world_size), steering=None)
    trainer.begin(Path(job.checkpoint) if job.checkpoint else None, recorded_start=True)
    plan = trainer.spool.read_plan(Spool.plan_name(job.step))
    versions, differing = _train_again(trainer, job)
    if job.save_to:
        save_checkpoint(trainer.engine, Path(job.save_to), job.step)
    if job.fault:
        versions = {
            version: _come_in_again(trainer, weights, scratch.path / f"version_{version}", job.fault)
            for version, weights in versions.items()
        }
    with injected_fault(job.fault):
        scorer = StepScorer(trainer, plan, versions)
        scores = score_all(scorer, job)
        unequal, compared = scorer.unequal_gradients() if job.compare_gradients else ((), 0)
    if trainer.groups.rank == 0:
        write_scores(scratch.path / SCORES, scores)
        (scratch.path / OUTCOME).write_bytes(encode(ScoringOutcome(job.step - job.start, differing, unequal, compared)))


def score_all(scorer: StepScorer, job: ScoringJob) -> dict[str, np.ndarray]:
    """By name, on rank 0. The hypotheses only where the residual leaves more than rounding."""
    scores = _scored(scorer, job.scorings)
    if job.residual is not None:
        recorded = scorer.recorded()
        left = None if recorded is None else float(np.nanmean(np.abs(scores[job.residual] - recorded)))
        if not broadcast_object(left) <= job.rounding:  # a NaN is too much as well
            scores |= _scored(scorer, job.hypotheses)
    return scores


def _scored(scorer: StepScorer, scorings: Mapping[str, Scoring]) -> dict[str, np.ndarray]:
    """By name on rank 0, {} on the others, which take part all the same."""
    return {name: scores for name, scoring in scorings.items() if (scores := scorer.score(scoring)) is not None}


def _train_again(trainer: Trainer, job: ScoringJob) -> tuple[dict[int, Weights], tuple[str, ...]]:
    """The weights of the job's versions, and metrics that did not come out as recorded."""
    versions = {}
    rows = {row.step: row.values for row in read_rows(trainer.folder.metrics_file)}
    differing: dict[str, None] = {}
    for step in range(job.start, job.step + 1):
        if step in job.versions:
            versions[step] = trainer.engine.parameters.snapshot()
        if step < job.step:
            found, recorded = trainer.train_plan(Spool.plan_name(step)), rows[step]
            compared = [name for name in OF_WEIGHTS if name in found and name in recorded]
            differing |= dict.fromkeys(name for name in compared if not _same(found[name], recorded[name]))
    return versions, tuple(differing)


def _come_in_again(trainer: Trainer, weights: Weights, folder: Path, fault: str) -> Weights:
    """The weights written out as a Hugging Face folder and read back with the fault injected, as at the start of a run."""
    with trainer.engine.using_weights(weights):
        write_policy(trainer.engine, folder, trainer.folder)
    with injected_fault(fault):
        trainer.engine.load_weights(HfCheckpoint.open(folder))
    return trainer.engine.parameters.snapshot()


def _differing(of_ranks: Sequence[dict[tuple[str, int], tuple[float, float]]]) -> tuple[tuple[str, ...], int]:
    held: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for own in of_ranks:
        for part, numbers in own.items():
            held.setdefault(part, []).append(numbers)
    shared = {part: numbers for part, numbers in held.items() if len(numbers) > 1}
    different = [
        name
        for (name, _), numbers in shared.items()
        if any(abs(a - b) > SAME_GRADIENT * numbers[0][1] for n in numbers[1:] for a, b in zip(n, numbers[0], strict=True))
    ]
    return tuple(dict.fromkeys(different)), len(shared)


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME_METRIC, abs_tol=1e-6) or (math.isnan(b) and not math.isfinite(a))


def main(arguments: Sequence[str]) -> None:
    """One rank of an attribution."""
    run, scratch = arguments
    ignore_sigterm()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    attribute(RunFolder(Path(run)), RunFolder(Path(scratch)))


if __name__ == "__main__":
    main(sys.argv[1:])
