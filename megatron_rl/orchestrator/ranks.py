"""The trainer's ranks as the orchestrator sees them: where they meet, and whether they are started again when one of them dies."""

import asyncio
from collections.abc import Awaitable, Callable

from megatron_rl.processes import Process
from megatron_rl.wire.control import Rendezvous

LEAVE_S = 15.0
"""How long the ranks that are left have to say in their logs why they end."""


class TrainerRanks:
    """max_restarts: without a step finished in between. start: all ranks anew, from the latest checkpoint, after it has ended what is left."""

    def __init__(self, max_restarts: int, start: Callable[[], Awaitable[list[Process]]]):
        self.rendezvous = Rendezvous()
        """Where those that live now meet."""
        self._max_restarts, self._start = max_restarts, start
        self._restarts = 0
        self._have_begun = False

    def ask_for_orders(self) -> None:
        """They have met, and have loaded the model."""
        self._have_begun = True

    def finish_step(self) -> None:
        """One that had not been done before."""
        self._restarts = 0

    def why_not_again(self) -> str:
        """'' when they may be started again."""
        if not self._have_begun:
            return "it ended before its first step"
        if self._restarts >= self._max_restarts:
            return f"started again {self._restarts} times without finishing a step (trainer.max_restarts)"
        return ""

    async def start_again(self, processes: list[Process]) -> None:
        """In `processes` the new ranks take the places of those of the world that has broken, dead or not."""
        self._restarts += 1
        broken = [process for process in processes if is_rank(process)]
        deadline = asyncio.get_running_loop().time() + LEAVE_S
        while any(rank.poll() is None for rank in broken) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.1)
        self.rendezvous = Rendezvous()
        started = await self._start()
        processes[:] = [process for process in processes if process not in broken] + started


def is_rank(process: Process) -> bool:
    return process.name.startswith("trainer")
