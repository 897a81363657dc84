"""Timers of named parts of the work, for metrics."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """Timers by name: `with spans("assemble"): ...`.

    Blocks of one name add up. Spans may be nested; each counts all of its block. There is no wait for an asynchronous device: a
    block that ends without a synchronisation counts the host's time.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block, also where it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self[name] + time.perf_counter() - began

    def __getitem__(self, name: str) -> float:
        """Seconds so far; 0 for a span that was never entered."""
        return self._seconds.get(name, 0.0)
