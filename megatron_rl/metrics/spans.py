"""Seconds of named parts of the work, for metrics."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """A timer: `with spans("assemble"): ...`. Blocks of one name add up; spans may be nested, and each counts its whole block.

    A device that works asynchronously is not waited for: a block that ends without a synchronisation counts the host's time.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self[name] + time.perf_counter() - began

    def __getitem__(self, name: str) -> float:
        """Seconds so far; 0 for a span that was never entered."""
        return self._seconds.get(name, 0.0)
