"""How long the engine's own work takes inside of Megatron's schedule."""

import time

import torch
from torch import Tensor


class Clock:
    """Adds up the time between `start` and `stop`, in seconds; on a GPU by events, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list = []

    def start(self) -> None:
        self._mark()

    def stop(self) -> None:
        self._mark()

    def read(self) -> float:
        """The sum since the last reading."""
        pairs = list(zip(self._marks[::2], self._marks[1::2]))
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


class StartsBackward(torch.autograd.Function):
    """The identity on a loss: its backward pass is the first thing that happens behind it."""

    @staticmethod
    def forward(ctx, loss: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.clock.start()
        return gradient, None


class EndsBackward(torch.autograd.Function):
    """The identity on what a loss is computed from: its backward pass runs when that of the loss is done."""

    @staticmethod
    def forward(ctx, hidden: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.clock.stop()
        return gradient, None
