"""Finished groups on their way to the trainer, and the rule that bounds their age: pure state, no clock, no tasks.

A group's age is counted at consumption: step s is trained from policy version s, so a group whose oldest token was sampled
by version v is s - v versions old there, and v + max_staleness is the last step that may consume it: its deadline.

Two decisions keep every group within its deadline, so that none has to be discarded for being slow (which would favour short
answers):

- admission: a group begins only if the steps up to its deadline have room for it after all older groups;
- choice: a step takes the oldest finished groups, and waits for slower ones where taking younger groups instead would leave
  more old groups than the steps before their deadline can take.

A group that is too old nevertheless (a server that lagged, a resumed run with another bound) is evicted and sampled again.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from megatron_rl.errors import RunError
from megatron_rl.records import GroupResult, RolloutSummary


class RolloutBufferError(RunError, ValueError):
    """A group begun, finished or taken twice, or a batch beyond the staleness bound: an error in the caller's bookkeeping."""


class GroupBuffer:
    """Groups in flight and finished, by prompt index.

    Args:
        prompts_per_step: Groups in the batch of a step.
        max_staleness: The largest age of a group when it is trained, in policy versions.
        next_step: The step that the next batch is for.
    """

    def __init__(self, *, prompts_per_step: int, max_staleness: int, next_step: int = 0) -> None:
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.next_step = next_step
        self._in_flight: dict[int, int] = {}  # prompt index -> version that was current when sampling began
        self._finished: dict[int, GroupResult] = {}

    @property
    def num_in_flight(self) -> int:
        """Groups that are being sampled."""
        return len(self._in_flight)

    @property
    def num_finished(self) -> int:
        """Groups that wait for a step."""
        return len(self._finished)

    def admissible(self, version: int, concurrent_groups: int = 0) -> int:
        """How many groups may begin now.

        Args:
            version: The policy version that the servers hold.
            concurrent_groups: The largest number of groups in flight; 0: only the staleness bound limits them.
        """
        steps_left = version + self.max_staleness - self.next_step + 1
        room = steps_left * self.prompts_per_step - self.num_in_flight - self.num_finished
        if concurrent_groups:
            room = min(room, concurrent_groups - self.num_in_flight)
        return max(0, room)

    def begin(self, prompt_index: int, version: int) -> None:
        """Record that a worker samples this prompt, on a server that holds `version`.

        Raises:
            RolloutBufferError: Its group is in flight or buffered already.
        """
        if prompt_index in self._in_flight or prompt_index in self._finished:
            raise RolloutBufferError(
                f"prompt {prompt_index} was begun a second time while its group is still in flight or buffered"
            )
        self._in_flight[prompt_index] = version

    def abandon(self, prompt_index: int) -> None:
        """The group in flight failed or was lost; nothing of it is kept."""
        if self._in_flight.pop(prompt_index, None) is None:
            raise RolloutBufferError(f"prompt {prompt_index} is not in flight, so it cannot be abandoned")

    def finish(self, result: GroupResult) -> None:
        """Buffer a complete group. Groups with all rewards equal are kept too: they count in the loss's denominator.

        Raises:
            RolloutBufferError: The group is not in flight, or has no rollouts.
        """
        if not result.rollouts:
            raise RolloutBufferError(f"group {result.uid} has no rollouts: a failed group is abandoned, not finished")
        self.abandon(result.prompt_index)
        self._finished[result.prompt_index] = result

    def evict_stale(self) -> list[GroupResult]:
        """Remove and return finished groups that `next_step` may no longer consume; the caller has them sampled again."""
        return self.take_out(lambda group: self._deadline(oldest_version(group)) < self.next_step)

    def take_out(self, is_bad: Callable[[GroupResult], bool]) -> list[GroupResult]:
        """Remove and return finished groups that may not be trained; the caller has their prompts sampled again."""
        bad = [group for group in self._in_order() if is_bad(group)]
        for group in bad:
            del self._finished[group.prompt_index]
        return bad

    def take_batch(self) -> tuple[GroupResult, ...] | None:
        """Remove and return the groups of `next_step`.

        Returns:
            The groups, oldest first (version, then prompt order). None: ask again when another group has ended.

        Raises:
            RolloutBufferError: The batch is beyond the staleness bound; call evict_stale() first.
        """
        chosen = self._in_order()[: self.prompts_per_step]
        if len(chosen) < self.prompts_per_step or self._should_wait(chosen):
            return None
        age = self.next_step - oldest_version(chosen[0])
        if age > self.max_staleness:
            raise RolloutBufferError(
                f"group {chosen[0].uid} is {age} versions old at step {self.next_step}, max_staleness is {self.max_staleness}"
            )
        for group in chosen:
            del self._finished[group.prompt_index]
        self.next_step += 1
        return tuple(chosen)

    def adopt(self, prompt_indices: Iterable[int], step: int) -> None:
        """Take over the batch of a plan that was written after this state was saved.

        Args:
            prompt_indices: The prompts of the plan.
            step: Of the plan.

        Raises:
            RolloutBufferError: It is not the next step.
        """
        if step != self.next_step:
            raise RolloutBufferError(f"the batch of step {step} cannot be adopted: the next step is {self.next_step}")
        for index in prompt_indices:
            self._finished.pop(index, None)
        self.next_step += 1

    def to_json(self) -> dict[str, Any]:
        """The finished groups and the step, as plain JSON values.

        Groups in flight end with the process; the ledger has their prompts sampled again.
        """
        return {"next_step": self.next_step, "finished": [asdict(group) for group in self._in_order()]}

    @classmethod
    def from_json(cls, state: dict[str, Any], *, prompts_per_step: int, max_staleness: int) -> "GroupBuffer":
        """The inverse of to_json."""
        buffer = cls(prompts_per_step=prompts_per_step, max_staleness=max_staleness, next_step=state["next_step"])
        buffer._finished = {group["prompt_index"]: _group(group) for group in state["finished"]}
        return buffer

    def _in_order(self) -> list[GroupResult]:
        return sorted(self._finished.values(), key=lambda group: (oldest_version(group), group.prompt_index))

    def _deadline(self, version: int) -> int:
        """Last step that may consume what `version` sampled."""
        return version + self.max_staleness

    def _should_wait(self, chosen: list[GroupResult]) -> bool:
        """Whether the step should wait for a group in flight, which could replace a younger one in `chosen`.

        It should where taking `chosen` now would leave more groups with a deadline up to some d than the steps in between can
        take.
        """
        taken = {group.prompt_index for group in chosen}
        flying = [self._deadline(version) for version in self._in_flight.values()]
        left = flying + [self._deadline(oldest_version(g)) for i, g in self._finished.items() if i not in taken]
        youngest = self._deadline(oldest_version(chosen[-1]))
        for deadline in set(flying):
            steps_after = max(0, deadline - self.next_step)
            overfull = _count_up_to(deadline, left) > steps_after * self.prompts_per_step
            if overfull and self.next_step <= deadline < youngest:
                return True
        return False


def oldest_version(group: GroupResult) -> int:
    """The version that sampled the group's oldest token."""
    return min(rollout.min_version for rollout in group.rollouts)


def _count_up_to(limit: int, values: Iterable[int]) -> int:
    return sum(value <= limit for value in values)


def _group(state: dict[str, Any]) -> GroupResult:
    rollouts = tuple(RolloutSummary(**rollout) for rollout in state["rollouts"])
    return GroupResult(**{**state, "rollouts": rollouts, "examples": tuple(state["examples"])})
