"""Context parallelism: how values over the positions that ranks hold come together again."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batching import SequenceSlice


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
