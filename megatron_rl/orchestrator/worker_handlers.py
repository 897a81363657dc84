"""What the orchestrator answers to the rollout workers.

Which groups to sample on which servers, and what becomes of the results.
"""

import time
from dataclasses import replace

from megatron_rl.orchestrator.context import RunContext
from megatron_rl.orchestrator.dispatcher import Dispatcher
from megatron_rl.records import GroupResult, GroupTask
from megatron_rl.wire.control import Ack, GroupReport, WorkOrder, WorkRequest

MAX_FAILURES_IN_A_ROW = 50
"""Groups that fail one after the other, without one that succeeds, before the run is given up: it would never make a step."""


class WorkerHandlers:
    """The workers' two messages."""

    def __init__(self, context: RunContext, dispatcher: Dispatcher) -> None:
        self._context, self._dispatcher = context, dispatcher
        self._examples: dict[str, tuple[dict, ...]] = {}
        self._num_tokens, self._counting_since = 0, time.monotonic()

    async def on_work(self, request: WorkRequest) -> WorkOrder:
        """Assign groups, as soon as there are some."""
        context = self._context
        tasks: tuple[GroupTask, ...] = ()

        def found() -> bool:
            nonlocal tasks
            tasks = () if context.stop_requested else self._dispatcher.assign(request, context.probe)
            return bool(tasks) or context.stop_requested

        await context.changes.wait_until(found, request.wait_s)
        return WorkOrder(tasks, stop=context.stop_requested)

    async def on_group(self, report: GroupReport) -> Ack:
        """Take in a group that a worker has sampled, or has failed to sample."""
        result, context = report.result, self._context
        if context.probe and result.uid in context.probe.in_flight:
            context.probe.end(result)
        elif context.state.end(self._checked(result)):
            context.watchdog.record_progress()
            self._num_tokens += sum(r.num_completion_tokens for r in result.rollouts)
            self._examples[result.uid] = result.examples
        if result.failure == "server":
            context.fleet.group_failed(result.server, result.message)
        elif result.failure is None:
            context.fleet.group_succeeded(result.server)
        if result.failure is not None:
            context.observe.event(f"group {result.uid} failed ({result.failure}): {result.message}")
        self._give_up_after_failures()
        await context.changes.notify()
        return Ack()

    def pop_examples(self, groups: tuple[GroupResult, ...]) -> list[dict]:
        """The readable rollouts of the groups that a step takes."""
        return [example for group in groups for example in self._examples.pop(group.uid, ())]

    def pop_tokens_per_s(self) -> float:
        """Completion tokens a second since the last call."""
        now = time.monotonic()
        rate = self._num_tokens / (now - self._counting_since)
        self._num_tokens, self._counting_since = 0, now
        return rate

    def _checked(self, result: GroupResult) -> GroupResult:
        """The result; that of a quarantined server as a failure, so that its prompt is sampled again."""
        if result.failure is None and self._context.fleet.is_quarantined(result.server):
            return replace(result, failure="server", message="its server was quarantined meanwhile")
        return result

    def _give_up_after_failures(self) -> None:
        state = self._context.state
        failures = state.recent_failures.total()
        if failures >= MAX_FAILURES_IN_A_ROW:
            self._context.fail(
                f"{failures} groups in a row failed {dict(state.recent_failures)}, the last by {state.last_failure}"
            )
