"""Worked solutions as training data: the same plan, the same microbatches, the loss on the solution's tokens."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.records import RaggedIds, Rollout, Sampling


@dataclass(frozen=True)
class SupervisedExample:
    """Token ids of a prompt and of its solution (with the end-of-sequence token, where that is to be learned); neither empty."""

    prompt_ids: tuple[int, ...]
    solution_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.solution_ids)


@dataclass(frozen=True)
class SupervisedPlan:
    """What one supervised step consumes; says nothing of the layout."""

    step: int
    examples: tuple[SupervisedExample, ...]

    @property
    def num_loss_tokens(self) -> int:
        return sum(len(e.solution_ids) for e in self.examples)

    @property
    def num_sequences(self) -> int:
        return len(self.examples)


def as_rollout(example: SupervisedExample, step: int, index: int) -> Rollout:
    """The example as a rollout of an untruncated policy: no keep-sets (all loss tokens are full rows), no routes, log-probs 0."""
    completion = np.array(example.solution_ids, dtype=np.int32)
    length = len(completion)
    return Rollout(
        uid=f"supervised{step:06d}.{index}",
        prompt_ids=np.array(example.prompt_ids, dtype=np.int32),
        completion_ids=completion,
        logprobs=np.zeros(length, dtype=np.float32),
        keep_sets=RaggedIds.empty(length),
        routed_experts=np.zeros((example.num_tokens - 1, 0, 0), dtype=np.uint8),
        policy_versions=np.full(length, step, dtype=np.int32),
        loss_mask=np.ones(length, dtype=bool),
        sampling=Sampling(),
        finish_reason="stop",
        reward=0.0,
    )
