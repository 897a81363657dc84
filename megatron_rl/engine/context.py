"""Context parallelism: which positions of a microbatch a rank holds, and how values over positions come together again.

With `size` ranks every segment is cut into 2 x size chunks; rank r holds the chunks r and 2 x size - 1 - r of each, so that all
ranks have the same share of the causal mask's work. For size 2 and a segment of 8:

    position   0 1 2 3 4 5 6 7
    rank       0 0 1 1 1 1 0 0

This is Transformer Engine's arrangement, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceSlice:
    """The positions of one rank, out of a microbatch's N."""

    own: np.ndarray
    """i64 [N / size], rising."""
    place: np.ndarray
    """i64 [N]: where each position stands when the slices of all ranks lie one after the other."""

    @classmethod
    def of(cls, segment_ends: Sequence[int] | np.ndarray, size: int, rank: int) -> "SequenceSlice":
        """segment_ends: from 0 to N; each segment's length is a multiple of 2 x size, unless size is 1."""
        return _slice_of(tuple(map(int, segment_ends)), size, rank)


@lru_cache(maxsize=64)
def _slice_of(segment_ends: tuple[int, ...], size: int, rank: int) -> SequenceSlice:
    """Every layer of a microbatch asks for the same one, in the forward pass and in the recomputation."""
    held = [_held(segment_ends, size, other) for other in range(size)]
    return SequenceSlice(held[rank], np.argsort(np.concatenate(held)))


def _held(segment_ends: tuple[int, ...], size: int, rank: int) -> np.ndarray:
    if size == 1:
        return np.arange(segment_ends[-1])
    parts = []
    for start, end in pairwise(segment_ends):
        chunk = (end - start) // (2 * size)
        parts += [start + chunk * number + np.arange(chunk) for number in (rank, 2 * size - 1 - rank)]
    return np.concatenate(parts)


def gather_positions(values: Tensor, slices: SequenceSlice, group: dist.ProcessGroup, *, sum_gradients: bool) -> Tensor:
    """[N / size, ...] of each rank to [N, ...] on all of them, in the order of the microbatch.

    sum_gradients: whether each rank goes on with a computation of its own, whose gradients belong together (keys and values).
    If not, all ranks compute the same from the result (the loss), and each takes its own part of that one gradient.
    """
    if group.size() == 1:
        return values
    return _Gather.apply(values, slices, group, sum_gradients)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, slices: SequenceSlice, group: dist.ProcessGroup, sum_gradients: bool) -> Tensor:
        ctx.slices, ctx.group, ctx.sum_gradients = slices, group, sum_gradients
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts)[torch.from_numpy(slices.place).to(values.device)]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.sum_gradients:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient[torch.from_numpy(ctx.slices.own).to(gradient.device)], None, None, None
