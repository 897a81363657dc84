"""What the orchestrator reports of a run, to whatever shows or writes it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_rl.wire.control import Progress


class Observer(Protocol):
    """The sinks of a run; see launch.observer."""

    def batch(self, summary: Mapping[str, float], examples: Sequence[dict]) -> None:
        """A step's batch was planned.

        Args:
            summary: Metrics of its rollouts.
            examples: A few of the rollouts as text.
        """

    def step(self, step: int, metrics: Mapping[str, float], *, rollout_tokens_per_s: float, ledger: Mapping[str, float]) -> None:
        """A step was trained.

        Args:
            step: Its number.
            metrics: The trainer's.
            rollout_tokens_per_s: Completion tokens of the groups that finished since the step before.
            ledger: Totals of the sample ledger.
        """

    def progress(self, report: Progress) -> None:
        """How far a phase without steps has come."""

    def event(self, message: str) -> None:
        """Something a person should know: a checkpoint, a server that left, a group that failed."""


def counted(number: int, noun: str) -> str:
    """'1 group', '3 groups'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
