"""The state of a run: which prompts are drawn, in flight, buffered, planned, trained.

Pure: no clock, no network, no files.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_rl.config import Config
from megatron_rl.orchestrator.buffer import GroupBuffer
from megatron_rl.orchestrator.ledger import Ledger
from megatron_rl.records import GroupResult, GroupTask, StepPlan


class RunState:
    """Buffer and ledger, changed together, so that every prompt is in exactly one place.

    Args:
        config: Of the run.
        ledger: The state of every prompt.
        buffer: The groups in flight and finished; of the same prompts.
    """

    def __init__(self, config: Config, ledger: Ledger, buffer: GroupBuffer) -> None:
        self._config = config
        self.ledger, self.buffer = ledger, buffer
        self._tasks: dict[str, GroupTask] = {}
        self.in_flight: Counter[str] = Counter()
        """Groups in flight by server."""
        self.recent_failures: Counter[str] = Counter()
        """Failures by kind since the last group that succeeded."""
        self.last_failure = ""

    @classmethod
    def new(cls, config: Config) -> "RunState":
        """The state of a run that begins."""
        r = config.rollouts
        buffer = GroupBuffer(prompts_per_step=r.prompts_per_step, max_staleness=r.max_staleness)
        return cls(config, Ledger(max_attempts=r.max_attempts), buffer)

    @classmethod
    def from_json(cls, config: Config, state: dict[str, Any]) -> "RunState":
        """The state at a checkpoint; groups that were in flight are sampled again.

        Raises:
            LedgerError: The totals do not add up.
        """
        r = config.rollouts
        ledger = Ledger.from_json(state["ledger"], max_attempts=r.max_attempts)
        ledger.interrupt()
        buffer = GroupBuffer.from_json(state["buffer"], prompts_per_step=r.prompts_per_step, max_staleness=r.max_staleness)
        return cls(config, ledger, buffer)

    def to_json(self) -> dict[str, Any]:
        """Ledger and buffer as plain JSON values, for the checkpoint."""
        return {"ledger": self.ledger.to_json(), "buffer": self.buffer.to_json()}

    def groups_to_begin(self, version: int) -> int:
        """How many groups may begin now, when the servers hold `version`."""
        return self.buffer.admissible(version, self._config.rollouts.concurrent_groups)

    def begin(self, server: str, version: int) -> GroupTask:
        """Draw the next prompt for a server that holds `version`."""
        draw = self.ledger.draw()
        uid = f"g{draw.prompt_index:07d}a{draw.attempt}"
        task = GroupTask(uid, draw.prompt_index, draw.attempt, self._config.rollouts.samples_per_prompt, server)
        self.buffer.begin(draw.prompt_index, version)
        self._tasks[uid] = task
        self.in_flight[server] += 1
        return task

    def end(self, result: GroupResult) -> bool:
        """Record the end of a group, with rollouts or with a failure.

        Returns:
            False when the group is not (or no longer) in flight; its result is then ignored.
        """
        if (task := self._tasks.pop(result.uid, None)) is None:
            return False
        self.in_flight[task.server] -= 1
        if result.failure is None:
            self.ledger.finish(result.prompt_index, [r.num_completion_tokens for r in result.rollouts])
            self.buffer.finish(result)
            self.recent_failures.clear()
        else:
            self.recent_failures[result.failure] += 1
            self.last_failure = f"{result.failure}: {result.message}"
            self.buffer.abandon(result.prompt_index)
            # A server's failure is not the prompt's fault: another server samples it, however often that happens.
            reason = "interrupted" if result.failure == "server" else result.failure
            self.ledger.discard(result.prompt_index, reason, [r.num_completion_tokens for r in result.rollouts])
        return True

    def lose_server(self, server: str) -> int:
        """Have the groups that were in flight on a server that has left sampled again, and return their number."""
        lost = [task for task in self._tasks.values() if task.server == server]
        for task in lost:
            self.end(GroupResult(task.uid, task.prompt_index, task.attempt, server, failure="server", message="left the fleet"))
        del self.in_flight[server]
        return len(lost)

    def discard_finished(self, is_bad: Callable[[GroupResult], bool], reason: str) -> int:
        """Have finished groups that no step has taken sampled again.

        Args:
            is_bad: Whether a group is one of them.
            reason: Under which the ledger counts them.

        Returns:
            The number of groups.
        """
        bad = self.buffer.take_out(is_bad)
        for group in bad:
            self.ledger.discard(group.prompt_index, reason)
        return len(bad)

    def take_step(self) -> tuple[GroupResult, ...] | None:
        """Remove and return the groups of the next step, None while it has to wait. Groups that are too old are sampled again."""
        for group in self.buffer.evict_stale():
            self.ledger.discard(group.prompt_index, "stale")
        step = self.buffer.next_step
        groups = self.buffer.take_batch()
        if groups is not None:
            self.ledger.plan([g.prompt_index for g in groups], step)
        return groups

    def adopt(self, plan: StepPlan) -> None:
        """Take over a recorded plan of the next step, written before the run was interrupted.

        It is trained as it is, so that no rollout is lost and the step gives the same result.
        """
        lengths: dict[int, list[int]] = {}
        for entry in plan.entries:
            lengths.setdefault(entry.prompt_index, []).append(entry.num_loss_tokens)
        self.buffer.adopt(lengths, plan.step)
        self.ledger.adopt(lengths, plan.step)
