"""A log-softmax in parts: what vocabulary shards and chunks know of it, and how the parts are merged.

Of the logits z that a part sees of a token it keeps four numbers, the rows of a tensor [4, T]: the maximum m, sum exp(z - m),
sum exp(z - m) (z - m), and the target's logit (0 in every part but one). A part that sees nothing of a token holds
m = the lowest finite number and zeros, which the merge ignores without a special case (an infinite m would give inf - inf).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.keep_set.collectives import gather_rows, group_size

MAXIMUM, TOTAL, MOMENT, TARGET = range(4)


def no_statistics(num_tokens: int, like: Tensor) -> Tensor:
    """[4, num_tokens], of the dtype and device of `like`, of tokens of which nothing was seen."""
    statistics = like.new_zeros(4, num_tokens)
    statistics[MAXIMUM] = torch.finfo(like.dtype).min
    return statistics


def merge(parts: Tensor) -> Tensor:
    """Merge the statistics of several parts of the vocabulary.

    Args:
        parts: [parts, 4, T].

    Returns:
        [4, T].
    """
    maximum = parts[:, MAXIMUM].amax(0)
    shift = parts[:, MAXIMUM] - maximum  # never positive: exp cannot overflow
    scale = shift.exp()
    total = parts[:, TOTAL] * scale
    moment = scale * (parts[:, MOMENT] + shift * parts[:, TOTAL])
    return torch.stack([maximum, total.sum(0), moment.sum(0), parts[:, TARGET].sum(0)])


def merge_across_ranks(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Merge the statistics of each rank's vocabulary shard; one collective, and the same bits on every rank.

    An all-gather of the four rows replaces one all-reduce of the maxima and one of the sums: half the latency.

    Args:
        statistics: [4, T] of this rank's shard.
        group: The tensor-parallel group.

    Returns:
        [4, T] of the full vocabulary.
    """
    return merge(gather_rows(statistics, group).view(group_size(group), 4, -1))


def log_probability(statistics: Tensor) -> Tensor:
    """[T], from merged statistics [4, T]. The maximum is subtracted first, so that a large logit costs no digits of log p."""
    return statistics[TARGET] - statistics[MAXIMUM] - statistics[TOTAL].log()


def entropy(statistics: Tensor) -> Tensor:
    """[T], in nats, from merged statistics [4, T]."""
    return statistics[TOTAL].log() - statistics[MOMENT] / statistics[TOTAL]
