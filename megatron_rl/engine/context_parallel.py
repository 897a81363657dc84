"""Context parallelism: gathering values over the positions that each rank holds a part of."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batching import SequenceSlice


def gather_positions(values: Tensor, slices: SequenceSlice, group: dist.ProcessGroup, *, sum_gradients: bool) -> Tensor:
    """All positions' values on every rank, in the order of the microbatch; a collective.

    Args:
        values: [N / size, ...] of this rank's positions.
        slices: Which of the N positions each rank holds.
        group: The context-parallel group.
        sum_gradients: Whether each rank continues with its own computation, whose gradients are added (keys and values). If not,
            all ranks compute the same from the result (the loss), and each takes its own part of that one gradient.

    Returns:
        [N, ...].
    """
    if group.size() == 1:
        return values
    return _GatherPositions.apply(values, slices, group, sum_gradients)


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slices: SequenceSlice, group: dist.ProcessGroup, sum_gradients: bool) -> Tensor:
        ctx.slices, ctx.group, ctx.sum_gradients = slices, group, sum_gradients
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts)[torch.from_numpy(slices.place).to(values.device)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.sum_gradients:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient[torch.from_numpy(ctx.slices.own).to(gradient.device)], None, None, None
