"""Who waits for whom, when a run makes no progress."""

import time
from collections.abc import Callable, Sequence

from megatron_rl.orchestrator.fleet import Server
from megatron_rl.orchestrator.observer import counted
from megatron_rl.orchestrator.state import RunState
from megatron_rl.wire.control import GroupReport, Order, ProbeOrder, WorkRequest

_WAITS_FOR = {"/order": "an order", "/probe": "the probe's rollouts"}
"""The trainer's questions, and what it waits for in them."""


class Watchdog:
    """Notes every message and all progress. clock: monotonic seconds."""

    def __init__(self, stall_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_after_s, self._clock = stall_after_s, clock
        self._moved_at = self._told_at = clock()
        self._trainer = "has sent no message yet: it loads its model, or its ranks wait for one another (logs/trainer-*.log)"
        self._trainer_since = clock()
        self._workers: dict[str, float] = {}

    def record_message(self, path: str, message: object) -> None:
        """A message has arrived."""
        if isinstance(message, WorkRequest | GroupReport):
            self._workers[message.worker] = self._clock()
        elif path in _WAITS_FOR:
            self._trainer_does(f"waits for {_WAITS_FOR[path]}")

    def record_answer(self, path: str, answer: object) -> None:
        """A message was answered. An answer without content: the trainer asks again, and still waits."""
        if isinstance(answer, Order) and answer.kind != "wait":
            self._trainer_does(f"carries out the order '{answer.kind}' (its ranks: logs/trainer-*.log)")
        elif isinstance(answer, ProbeOrder) and answer.ready:
            self._trainer_does("scores the probe")
        elif path in ("/step", "/weights", "/probed", "/saved"):
            self._trainer_does(f"continues after its report {path}")

    def _trainer_does(self, what: str) -> None:
        if what != self._trainer:
            self._trainer, self._trainer_since = what, self._clock()

    def record_progress(self) -> None:
        """A group or a step is finished."""
        self._moved_at = self._told_at = self._clock()

    def stall(self, step: int, state: RunState, servers: Sequence[Server]) -> str | None:
        """The message, when there has been no progress for long; None otherwise."""
        now = self._clock()
        if now - self._told_at < self._stall_after_s:
            return None
        self._told_at = now
        lines = [
            f"no group and no step has been finished for {now - self._moved_at:.0f} s:",
            self._trainer_line(step, state, now),
        ]
        lines += [self._worker_line(name, now) for name in self._workers] or ["no worker has asked for work yet"]
        lines += [_server_line(server, state) for server in servers]
        return "\n  ".join(lines)

    def _trainer_line(self, step: int, state: RunState, now: float) -> str:
        buffer = state.buffer
        groups = (
            f"{counted(buffer.num_finished, 'group')} of the {buffer.prompts_per_step} that a step takes are finished, "
            f"{buffer.num_in_flight} in flight"
        )
        return f"the trainer, at step {step}, {self._trainer}, for {now - self._trainer_since:.0f} s; for its next batch {groups}"

    def _worker_line(self, name: str, now: float) -> str:
        return f"worker {name} sent its last message {now - self._workers[name]:.0f} s ago"


def _server_line(server: Server, state: RunState) -> str:
    holds = "no known version" if server.version is None else f"version {server.version}"
    samples = counted(state.in_flight[server.url], "group")
    return f"server {server.slot} at {server.url or '(starting)'} is {server.state}, holds {holds}, samples {samples}"
