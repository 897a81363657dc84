"""Handlers that wait for something in the orchestrator's state, and are woken whenever it has changed."""

import asyncio
from collections.abc import Callable


class Changes:
    def __init__(self) -> None:
        self._condition = asyncio.Condition()

    async def tell(self) -> None:
        """Something has changed."""
        async with self._condition:
            self._condition.notify_all()

    async def wait_until(self, holds: Callable[[], object], timeout_s: float) -> None:
        """Until `holds()` is true, asked again at each change, or until the time is over. `holds` may take what it finds."""
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
