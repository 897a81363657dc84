"""A condition that handlers wait on: they are woken whenever the orchestrator's state has changed."""

import asyncio
from collections.abc import Callable


class Changes:
    """One condition for the complete state: each change notifies, and each waiting handler checks its own condition."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()

    async def notify(self) -> None:
        """Wake all that wait, after a change of the state."""
        async with self._condition:
            self._condition.notify_all()

    async def wait_until(self, holds: Callable[[], object], timeout_s: float) -> None:
        """Return once `holds()` is true or the time is over.

        Args:
            holds: Called at once and after each change. It may take what it finds: after a true value it is not called again.
            timeout_s: Seconds.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with self._condition:
            while not holds():
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    return
                try:
                    async with asyncio.timeout(left):
                        await self._condition.wait()
                except TimeoutError:
                    return
