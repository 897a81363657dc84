"""The loss tokens of a recorded step."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.batching import Spool
from megatron_rl.records import StepPlan


@dataclass(frozen=True)
class StepRecord:
    """M loss tokens, in the order of the plan's E entries and of their completions: the order of all scores of the step."""

    plan: StepPlan
    entry: np.ndarray  # i64 [M], number among the plan's entries
    place: np.ndarray  # i64 [M], among the completion's tokens
    position: np.ndarray  # i64 [M], in the whole sequence
    token: np.ndarray  # i64 [M]
    logprobs: np.ndarray  # f64 [M], as the sampler recorded them
    version: np.ndarray  # i64 [M], of the weights that sampled it
    set_size: np.ndarray  # i64 [M]; 0: no keep-set
    is_last: np.ndarray  # bool [M]: the last token of its sequence
    temperature: np.ndarray  # f64 [E]

    @property
    def num_tokens(self) -> int:
        """M, the number of loss tokens."""
        return len(self.token)

    @property
    def staleness(self) -> np.ndarray:
        """i64 [M], in versions."""
        return self.plan.step - self.version


def read_record(spool: Spool, plan: StepPlan) -> StepRecord:
    """Raises PayloadError where a rollout cannot be read."""
    columns: dict[str, list[np.ndarray]] = {}
    temperatures = []
    for number, entry in enumerate(plan.entries):
        r = spool.payload(entry.file).rollout(entry.index, ())
        trained = np.flatnonzero(r.loss_mask)
        of_one = {
            "entry": np.full(len(trained), number),
            "place": trained,
            "position": trained + len(r.prompt_ids),
            "token": r.completion_ids[trained],
            "logprobs": r.logprobs[trained].astype(np.float64),
            "version": r.policy_versions[trained],
            "set_size": r.set_sizes[trained],
            "is_last": trained == len(r.completion_ids) - 1,
        }
        for name, values in of_one.items():
            columns.setdefault(name, []).append(values)
        temperatures.append(r.sampling.temperature)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return StepRecord(plan=plan, temperature=np.array(temperatures), **joined)
