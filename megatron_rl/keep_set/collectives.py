"""Collectives over the tensor-parallel group; without one, or with one rank, they do nothing."""

import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 has these names and warns of the older ones at each call
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[k, n] of this rank to [ranks * k, n] of all, in rank order."""
    if group_size(group) == 1:
        return rows
    whole = rows.new_empty(rows.shape[0] * group.size(), rows.shape[1])
    _all_gather(whole, rows.contiguous(), group=group)
    return whole


def reduce_hidden_gradient(
    d_hidden: Tensor, computed: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """Sum over the vocabulary shards, in the accumulation dtype of d_hidden [T, H]; [T / tp, H] with sequence parallelism.

    computed: int64, the tokens with a gradient: without sequence parallelism only their rows are sent.
    """
    if group_size(group) == 1:
        return d_hidden
    if sequence_parallel:
        own = d_hidden.new_empty(d_hidden.shape[0] // group.size(), d_hidden.shape[1])
        _reduce_scatter(own, d_hidden, group=group)
        return own
    rows = d_hidden[computed]
    dist.all_reduce(rows, group=group)
    return d_hidden.index_copy_(0, computed, rows)
