"""The trainer's ranks as the orchestrator sees them: where they meet, and whether they are restarted when one of them dies."""

import asyncio
from collections.abc import Awaitable, Callable

from megatron_rl.processes import Process
from megatron_rl.wire.control import Rendezvous

WINDOW_STEPS = 10
"""Finished steps within which restarts are counted."""

LEAVE_S = 15.0
"""How long the remaining ranks have to write into their logs why they end."""


class TrainerRanks:
    """One set of ranks at a time; a restart replaces all of them.

    Args:
        max_restarts: Within WINDOW_STEPS finished steps. Not only without one: a fault that comes back at every step would have
            them restarted without end.
    """

    def __init__(self, max_restarts: int) -> None:
        self.rendezvous = Rendezvous()
        """Where the present ranks meet."""
        self._max_restarts = max_restarts
        self._num_finished = 0
        self._restarted_after: list[int] = []  # steps that were finished before each restart
        self._have_begun = False

    def record_order_request(self) -> None:
        """Rank 0 has asked for an order: the ranks have met and have loaded the model."""
        self._have_begun = True

    def finish_step(self) -> None:
        """They have finished a step that had not been done before."""
        self._num_finished += 1

    def why_no_restart(self) -> str:
        """Why they may not be restarted; '' when they may."""
        if not self._have_begun:
            return "it ended before its first step"
        recent = sum(1 for finished in self._restarted_after if finished > self._num_finished - WINDOW_STEPS)
        if recent >= self._max_restarts:
            return f"restarted {recent} times within {WINDOW_STEPS} finished steps (trainer.max_restarts)"
        return ""

    async def restart(self, processes: list[Process], start: Callable[[], Awaitable[list[Process]]]) -> None:
        """Replace all ranks in `processes`, dead or not, by new ones.

        Args:
            processes: Of the run; changed in place.
            start: Ends what is left of the ranks, then starts all of them from the latest checkpoint.
        """
        self._restarted_after.append(self._num_finished)
        broken = [process for process in processes if is_rank(process)]
        deadline = asyncio.get_running_loop().time() + LEAVE_S
        while any(rank.poll() is None for rank in broken) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.1)
        self.rendezvous = Rendezvous()
        started = await start()
        processes[:] = [process for process in processes if process not in broken] + started


def is_rank(process: Process) -> bool:
    """Whether the process is a rank of the trainer."""
    return process.name.startswith("trainer")
