"""Collectives over the tensor-parallel group; without one, or with one rank, they do nothing."""

import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 has these names, and warns about the older ones at each call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group; 1 without one."""
    return 1 if group is None else group.size()


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' rows.

    Args:
        rows: [k, n] of this rank.
        group: The tensor-parallel group.

    Returns:
        [ranks * k, n], in rank order.
    """
    if group is None or group.size() == 1:
        return rows
    gathered = rows.new_empty(rows.shape[0] * group.size(), rows.shape[1])
    _all_gather(gathered, rows.contiguous(), group=group)
    return gathered


def reduce_hidden_gradient(
    d_hidden: Tensor, computed: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """Sum the gradient of the hidden states over the vocabulary shards, in its own dtype.

    Args:
        d_hidden: [T, H], this rank's part of the sum; overwritten.
        computed: int64, the tokens with a gradient: without sequence parallelism only their rows are sent.
        group: The tensor-parallel group.
        sequence_parallel: Each rank needs its own part of the sequence.

    Returns:
        [T, H]; [T / tp, H] with sequence parallelism.
    """
    if group is None or group.size() == 1:
        return d_hidden
    if sequence_parallel:
        own = d_hidden.new_empty(d_hidden.shape[0] // group.size(), d_hidden.shape[1])
        _reduce_scatter(own, d_hidden, group=group)
        return own
    rows = d_hidden[computed]
    dist.all_reduce(rows, group=group)
    return d_hidden.index_copy_(0, computed, rows)
