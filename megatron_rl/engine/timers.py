"""How long the engine's own work takes inside Megatron's schedule."""

import time
from typing import Any

import torch
from torch import Tensor


class Timer:
    """Adds up the seconds between `start` and `stop`; on a GPU by CUDA events, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []  # starts and stops in turn: CUDA events, or seconds

    def start(self) -> None:
        """Begin an interval."""
        self._mark()

    def stop(self) -> None:
        """End the interval that `start` began."""
        self._mark()

    def read(self) -> float:
        """The sum since the last reading, in seconds; on a GPU this waits for all of its work."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=False))
        self._marks = []
        if self._cuda:
            torch.cuda.synchronize()
            return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        return sum(end - begin for begin, end in pairs)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())


class StartTimerInBackward(torch.autograd.Function):
    """The identity on a loss. Its backward pass runs first, before that of everything the loss is computed from."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, timer: Timer) -> Tensor:
        """Return the loss as a new tensor in the graph."""
        ctx.timer = timer
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Start the timer."""
        ctx.timer.start()
        return gradient, None


class StopTimerInBackward(torch.autograd.Function):
    """The identity on what a loss is computed from. Its backward pass runs after that of the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, timer: Timer) -> Tensor:
        """Return a view, which is a new node in the graph."""
        ctx.timer = timer
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Stop the timer."""
        ctx.timer.stop()
        return gradient, None
