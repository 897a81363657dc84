"""The log-probs that a step's loss was computed from: quantiles of their ratios, and those of a few rollouts for the report."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.engine.head import Loss
from megatron_rl.objective import NUM_BINS, Measured, TokenBatch, ratio_counts, ratio_quantiles
from megatron_rl.records import PlanEntry, StepPlan
from megatron_rl.trainer.ranks import gather_object


class LogProbRecorder:
    """A loss that records the log-probs of each microbatch; the schedule runs those of the last stage in their order."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.log_probs: list[Tensor] = []  # f32 [N] of each microbatch; empty on ranks that compute no loss
        self.ratio_counts: list[Tensor] = []  # of each microbatch's loss tokens, as `ratio_counts` makes them

    def __call__(self, log_probs: Tensor, batch: TokenBatch) -> tuple[Tensor, Measured]:
        """The loss and its metrics. log_probs: f32 [N] over the microbatch's positions."""
        self.log_probs.append(log_probs.detach())
        self.ratio_counts.append(ratio_counts(log_probs.detach()[batch.position] - batch.rollout_logprobs))
        return self._loss(log_probs, batch)


def step_ratio_quantiles(recorded: Sequence[LogProbRecorder], is_reporting_rank: bool, device: torch.device) -> dict[str, float]:
    """Quantiles of p / p_rollout over all loss tokens of a step, of all ranks; a collective.

    Args:
        recorded: One for each update of the step.
        is_reporting_rank: Whether this rank's tokens count: of several ranks with the same tokens, one reports.
        device: Of the counts, as the process group's backend needs it.
    """
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=device)
    if is_reporting_rank:
        for of_microbatch in (counted for loss in recorded for counted in loss.ratio_counts):
            counts += of_microbatch
    dist.all_reduce(counts)
    return ratio_quantiles(counts)


def step_scores(
    updates: Sequence[tuple[StepPlan, Sequence[Microbatch], LogProbRecorder]], count: int, is_reporting_rank: bool
) -> dict[str, np.ndarray]:
    """The log-probs that the loss got of a few rollouts of each update; a collective, unless count is 0.

    Args:
        updates: Of each update its plan, this rank's microbatches and what the loss recorded of them.
        count: Number of rollouts of each update.
        is_reporting_rank: As in `step_ratio_quantiles`.

    Returns:
        On rank 0, uid to f32 [C]; nothing on the others.
    """
    own: dict[str, np.ndarray] = {}
    if not count:
        return own
    if is_reporting_rank:
        for plan, microbatches, recorded in updates:
            own |= completion_scores(microbatches, recorded.log_probs, plan.entries, shown_entries(plan, count))
    return {uid: scores for of_rank in gather_object(own) or () for uid, scores in of_rank.items()}


def shown_entries(plan: StepPlan, count: int) -> set[int]:
    """Numbers of at most `count` entries, evenly from the best advantage to the worst, both included: the extremes show most."""
    ordered = sorted(range(len(plan.entries)), key=lambda number: -plan.entries[number].advantage)
    places = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return {ordered[place] for place in places}


def completion_scores(
    microbatches: Sequence[Microbatch], log_probs: Sequence[Tensor], entries: Sequence[PlanEntry], shown: set[int]
) -> dict[str, np.ndarray]:
    """The log-probs of some rollouts' completions.

    Args:
        microbatches: A rank's, of one update.
        log_probs: f32 [N] of each microbatch.
        entries: Of the update's plan.
        shown: Numbers of the wanted entries.

    Returns:
        Uid to f32 [C] of the wanted entries in these microbatches: NaN for a completion token without loss. C ends with the last
        loss token.
    """
    found = {}
    for microbatch, values in zip(microbatches, log_probs, strict=True):
        here = shown.intersection(np.unique(microbatch.sequence[microbatch.loss_mask]).tolist())
        if not here:
            continue  # most microbatches: their values stay on the device
        host = values.float().cpu().numpy()
        for number in here:
            places = np.flatnonzero((microbatch.sequence == number) & microbatch.loss_mask)
            of_completion = np.full(int(microbatch.completion_index[places].max()) + 1, np.nan, dtype=np.float32)
            of_completion[microbatch.completion_index[places]] = host[places]
            found[entries[number].uid] = of_completion
    return found
