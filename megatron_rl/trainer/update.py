"""One optimizer update of a step on this rank, and the metrics of a step, computed from its updates'."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.batching import Microbatch
from megatron_rl.metrics import Metric, Spans, merge, to_floats
from megatron_rl.records import StepPlan
from megatron_rl.trainer.scored import LogProbRecorder

_SECONDS = ("forward_backward_s", "optimizer_s", "own_s")


@dataclass(frozen=True)
class Update:
    """What one update of a step trains on: a step of two updates over 64 rollouts has two, of 32 rollouts each."""

    plan: StepPlan
    """The update's part of the step plan, with its own denominators."""
    microbatches: Sequence[Microbatch]
    """This data-parallel rank's."""
    loss: LogProbRecorder


def metrics_of_step(updates: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """The step's metrics: seconds of its updates add up, the loss is their mean, the others have their own reduction."""
    values = to_floats(merge(updates))
    for name in _SECONDS:
        values[name] = sum(update[name].value for update in updates)
    values["loss"] = sum(update["loss"].value for update in updates) / len(updates)
    return values


def step_times(spans: Spans, metrics: dict[str, float], num_tokens: int) -> dict[str, float]:
    """The step's own times, from its spans.

    overhead_share is the share of a step's work that is neither Megatron's passes nor the optimizer: reading, checking, packing,
    replay, loss, metrics and fingerprints. The work is without waiting and without the weight update of the servers.

    Args:
        spans: Holds step, assemble and score.
        metrics: Those of the step so far.
        num_tokens: Of the step's rollouts, prompts included.

    Returns:
        step_s, assemble_s, score_s, overhead_share and trainer_tokens_per_s.
    """
    own_s = spans["assemble"] + metrics["own_s"] + metrics.get("fingerprint_s", 0.0)
    work_s = metrics["forward_backward_s"] + metrics["optimizer_s"] + spans["score"]
    return {
        "step_s": spans["step"],
        "assemble_s": spans["assemble"],
        "score_s": spans["score"],
        "overhead_share": own_s / (own_s + work_s),
        "trainer_tokens_per_s": num_tokens / spans["step"],
    }
