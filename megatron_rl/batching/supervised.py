"""Reference solutions as training data: the same microbatches, with the loss on the solution's tokens."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.records import RaggedIds, Rollout, Sampling


@dataclass(frozen=True)
class SupervisedExample:
    """Token ids of a prompt and of its solution; neither is empty.

    Example: SupervisedExample(prompt_ids=(5, 42, 6, 61), solution_ids=(9, 0)), whose 0 is the end-of-sequence token to be
        learned.
    """

    prompt_ids: tuple[int, ...]
    solution_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt and solution."""
        return len(self.prompt_ids) + len(self.solution_ids)


@dataclass(frozen=True)
class SupervisedPlan:
    """What one step of a supervised start consumes; says nothing of the parallelism layout."""

    step: int
    examples: tuple[SupervisedExample, ...]

    @property
    def num_loss_tokens(self) -> int:
        """Tokens of all solutions."""
        return sum(len(e.solution_ids) for e in self.examples)

    @property
    def num_sequences(self) -> int:
        """Number of examples."""
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
