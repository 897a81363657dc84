"""What the orchestrator tells of a run, to whoever shows or writes it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_rl.wire.control import Progress


class Observer(Protocol):
    def batch(self, summary: Mapping[str, float], examples: Sequence[dict]) -> None:
        """A step's batch was planned: what is known of its rollouts, and a few of them readable."""

    def step(self, step: int, metrics: Mapping[str, float], *, rollout_tokens_per_s: float, ledger: Mapping[str, float]) -> None:
        """A step was trained."""

    def progress(self, report: Progress) -> None:
        """How far a phase without steps has come."""

    def event(self, message: str) -> None:
        """Something a person should know: a checkpoint, a server that left, a group that failed."""
