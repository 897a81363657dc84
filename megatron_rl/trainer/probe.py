"""Probe rollouts: sampled directly after a weight update and scored by the trainer before its next step, at the same weights."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_rl.batching import AssemblyOptions, Microbatch, microbatches_for
from megatron_rl.engine.engine import Scores
from megatron_rl.metrics import Metric, merge, to_floats
from megatron_rl.objective import Denominators, mismatch_metrics, token_batch
from megatron_rl.records import StepPlan
from megatron_rl.trainer.rank import TrainerRank
from megatron_rl.trainer.ranks import broadcast_object, gather
from megatron_rl.wire.control import ProbeReport


class Prober:
    """Scores the rollouts that servers sample after a weight update.

    Where the objective switches a replay off, a probe is scored twice: as the objective scores, for the metrics; and with every
    replay on, for the distances by which the orchestrator decides whether a server passes the probe.
    """

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank
        self._faithful = replace(rank.options, keep_set_replay=True, routing_replay=True)

    def score(self, version: int) -> dict[str, float]:
        """Get the probe of a version from the orchestrator, score it and report each rollout's distance; a collective.

        Args:
            version: Of the weights, which are the trainer's present ones.

        Returns:
            Metrics named probe/...; none where no probe was sampled in time.
        """
        t = self._rank
        poll = t.steering.probe_poll(version, t.config.servers.request_timeout_s) if t.steering else None
        plan_file: str | None = None
        while plan_file is None:
            plan_file = broadcast_object(poll() if poll else None)
        if not plan_file:
            return {}
        plan = t.spool.read_plan(plan_file)
        metrics, distances = self._score(plan, t.options)
        if t.options != self._faithful:
            _, distances = self._score(plan, self._faithful)
        if t.steering:
            t.steering.report(ProbeReport(version, distances))
        return {f"probe/{name}": value for name, value in metrics.items()}

    def _score(self, plan: StepPlan, options: AssemblyOptions) -> tuple[dict[str, float], dict[str, float]]:
        t = self._rank
        microbatches = microbatches_for(plan, t.spool, t.groups.layout, t.groups.coords, options)
        scores = t.engine.score(microbatches)
        # Ranks of one data-parallel replica hold the same scores: one of them reports.
        is_reporting_rank = t.groups.coords.tp == 0 and t.groups.coords.pp == 0 and t.groups.coords.cp == 0
        own = (_mismatch(microbatches, scores, plan), _distances(microbatches, scores, plan)) if is_reporting_rank else ({}, {})
        everywhere = gather(own)
        return to_floats(merge([m for m, _ in everywhere])), {uid: d for _, part in everywhere for uid, d in part.items()}


def _mismatch(microbatches: Sequence[Microbatch], scores: Sequence[Scores], plan: StepPlan) -> dict[str, Metric]:
    denominators = Denominators.of(plan)
    return merge(
        mismatch_metrics(torch.from_numpy(s.log_probs), token_batch(m, denominators)).metrics()
        for m, s in zip(microbatches, scores, strict=True)
    )


def _distances(microbatches: Sequence[Microbatch], scores: Sequence[Scores], plan: StepPlan) -> dict[str, float]:
    """Uid to mean |log p_trainer - log p_rollout| over the rollout's loss tokens."""
    distances = {}
    for m, s in zip(microbatches, scores, strict=True):
        d = np.abs(s.log_probs.astype(np.float64) - m.rollout_logprobs)
        for number in np.unique(m.sequence[m.loss_mask]):
            distances[plan.entries[number].uid] = float(d[(m.sequence == number) & m.loss_mask].mean())
    return distances
