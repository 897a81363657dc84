"""Probe rollouts.

Sampled right after a weight update as in training, scored by the trainer at equal weights, never trained on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_rl.records import GroupResult, GroupTask


@dataclass
class Probe:
    """The probe of one version: the tasks that wait for a worker, those in flight, and the results."""

    version: int
    waiting: list[GroupTask]
    in_flight: dict[str, GroupTask] = field(default_factory=dict)
    results: list[GroupResult] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """By server, the reason of its last failed probe, where the failure was the server's."""

    @classmethod
    def on(cls, servers: list[str], version: int, num_prompts: int) -> "Probe":
        """Prompts assigned in turn, at least one for each server, so that each server's weights are checked."""
        tasks = [
            GroupTask(f"probe{version}p{i}", version * num_prompts + i, 0, 1, servers[i % len(servers)], probe=True)
            for i in range(max(num_prompts, len(servers)))
        ]
        return cls(version, tasks)

    def take(self, serves: Callable[[str], bool]) -> GroupTask | None:
        """The next task on a server that the asking worker serves."""
        task = next((task for task in self.waiting if serves(task.server)), None)
        if task is not None:
            self.waiting.remove(task)
            self.in_flight[task.uid] = task
        return task

    def end(self, result: GroupResult) -> None:
        """A task has ended, well or not."""
        if self.in_flight.pop(result.uid, None) is None:
            return
        if result.failure is None:
            self.results.append(result)
        elif result.failure in ("contract", "server"):
            self.failures[result.server] = result.message

    def lose_server(self, server: str) -> None:
        """A server has left: its tasks are dropped."""
        self.waiting = [t for t in self.waiting if t.server != server]
        self.in_flight = {uid: t for uid, t in self.in_flight.items() if t.server != server}

    @property
    def ended(self) -> bool:
        """Whether every task has ended."""
        return not self.waiting and not self.in_flight

    def evaluate(self, abs_dlogp: dict[str, float], tolerance: float) -> dict[str, str]:
        """The servers that fail the probe.

        Args:
            abs_dlogp: By rollout uid, mean |log p_trainer - log p_rollout|.
            tolerance: For the mean over a server's rollouts.

        Returns:
            Server to reason, for those above the tolerance, and for those none of whose probes could be scored: wrong weights
            may be too wrong for an answer.
        """
        by_server: dict[str, list[float]] = {}
        for result in self.results:
            by_server.setdefault(result.server, []).extend(abs_dlogp[r.uid] for r in result.rollouts if r.uid in abs_dlogp)
        means = {server: sum(values) / len(values) for server, values in by_server.items() if values}
        off = {
            server: f"the probe after version {self.version} is off by {mean:.3g} (mean |log p_trainer - log p_rollout|, "
            f"tolerance {tolerance:g}): the server does not hold the trainer's weights"
            for server, mean in means.items()
            if not mean <= tolerance  # a NaN is off too
        }
        unscored = {server: message for server, message in self.failures.items() if server not in means}
        return off | {
            server: f"the probe after version {self.version} could not be scored: {message}"
            for server, message in unscored.items()
        }
