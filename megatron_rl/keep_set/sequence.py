"""Sequence parallelism at the entrance to the output layer: hidden states come in, and their gradients leave."""

import torch.distributed as dist
from torch import Tensor


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T / tp, H] of this rank to [T, H] of all, in rank order."""
    if group is None or group.size() == 1:
        return hidden
    whole = hidden.new_empty(hidden.shape[0] * group.size(), hidden.shape[1])
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
    return whole


def reduce_hidden_gradient(d_hidden: Tensor, computed: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Sum over the vocabulary shards, in the accumulation dtype of d_hidden [T, H]; [T / tp, H] with sequence parallelism.

    computed: int64, the tokens with a gradient: without sequence parallelism only their rows are sent.
    """
    if group is None or group.size() == 1:
        return d_hidden
    if sequence_parallel:
        own = d_hidden.new_empty(d_hidden.shape[0] // group.size(), d_hidden.shape[1])
        dist.reduce_scatter_tensor(own, d_hidden, group=group)
        return own
    rows = d_hidden[computed]
    dist.all_reduce(rows, group=group)
    return d_hidden.index_copy_(0, computed, rows)
