"""A sink that can neither fail a step nor hold one up: it is written by a thread of its own, from a bounded queue."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

QUEUE_LENGTH = 1000
CLOSE_TIMEOUT_S = 20.0


class BackgroundSink:
    """Writes of one sink, in order. What cannot be written is dropped and counted; the first fault of each kind is said.

    Args:
        name: Of the sink, for messages.
        write: Called in the thread, once for each `put`.
        close: Called in the thread, after the last write.
        queue_length: Most writes that wait; further ones are dropped.
    """

    def __init__(
        self, name: str, write: Callable[..., None], close: Callable[[], None] | None = None, queue_length: int = QUEUE_LENGTH
    ) -> None:
        self.name, self._write, self._close = name, write, close
        self.lost = 0
        """Writes that were dropped."""
        self._faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: set[str] = set()
        self._waiting: queue.Queue[tuple[Any, ...] | None] = queue.Queue(queue_length)
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, *arguments: Any) -> None:
        """Have it written; returns at once."""
        try:
            self._waiting.put_nowait(arguments)
        except queue.Full:
            self._drop("is too slow", f"{self._waiting.maxsize} writes wait already; those that follow are left out")

    def take_faults(self) -> list[str]:
        """Lines on what has gone wrong since the last call."""
        found = []
        while not self._faults.empty():
            found.append(self._faults.get())
        return found

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until what waits is written, but no longer than this; the rest is lost, and the thread is left alone."""
        try:
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            left = max(1, self._waiting.qsize())
            self.lost += left
            self._say("has not finished", f"it was left alone {timeout_s:g} s after the end of the run, with {left} writes to go")

    def _run(self) -> None:
        while (arguments := self._waiting.get()) is not None:
            self._guarded(partial(self._write, *arguments), "cannot be written")
        if self._close is not None:
            self._guarded(self._close, "cannot be closed")

    def _guarded(self, action: Callable[[], None], what: str) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever the library raises costs this write alone
            self._drop(what, f"{type(error).__name__}: {error}")

    def _drop(self, what: str, reason: str) -> None:
        self.lost += 1
        self._say(what, reason)

    def _say(self, what: str, reason: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._faults.put(f"{self.name} {what}: {reason}; the run goes on, and summary.json says how many writes were lost")
