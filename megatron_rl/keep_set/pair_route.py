"""The pair route: logits of named rows only, and their gradients.

Its cost is proportional to the number of pairs; nothing is as long as the vocabulary.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatron_rl.keep_set.shard_plan import Pairs
from megatron_rl.keep_set.statistics import MAXIMUM, MOMENT, TARGET, TOTAL, entropy, no_statistics
from megatron_rl.keep_set.weight_gradient import WeightGradient

_SUMS_BYTES = 16 << 20  # row gradients that are summed before they are added to the weight's


def pair_statistics(logits: Tensor, pairs: Pairs, needs_entropy: bool) -> Tensor:
    """The statistics of this rank's pairs.

    Args:
        logits: [n], divided by the temperature.
        pairs: The same n pairs.
        needs_entropy: Whether the row MOMENT is filled.

    Returns:
        [4, T], see statistics.py.
    """
    statistics = no_statistics(len(pairs.offsets) - 1, logits)
    lowest = torch.finfo(logits.dtype).min
    statistics[MAXIMUM] = torch.segment_reduce(logits, "max", offsets=pairs.offsets, initial=lowest)
    shifted = logits - statistics[MAXIMUM][pairs.tokens]
    exponentials = shifted.exp()
    statistics[TOTAL] = torch.segment_reduce(exponentials, "sum", offsets=pairs.offsets, initial=0)
    if needs_entropy:
        statistics[MOMENT] = torch.segment_reduce(exponentials * shifted, "sum", offsets=pairs.offsets, initial=0)
    statistics[TARGET][pairs.tokens[pairs.targets]] = logits[pairs.targets]
    return statistics


def logit_gradients(
    logits: Tensor, pairs: Pairs, statistics: Tensor, upstream: Tensor, upstream_entropy: Tensor | None
) -> Tensor:
    """Gradients of the pairs' logits: d log p / d z_j = 1[j = y] - p_j; d entropy / d z_j = -p_j (log p_j + entropy).

    Args:
        logits: [n], divided by the temperature.
        pairs: The same n pairs.
        statistics: [4, T], merged over all ranks.
        upstream: [T], the gradient of the log-probs.
        upstream_entropy: [T], the gradient of the entropies; None: they have none.

    Returns:
        [n].
    """
    log_p = logits - statistics[MAXIMUM][pairs.tokens] - statistics[TOTAL].log()[pairs.tokens]
    p = log_p.exp()
    d_logits = -p * upstream[pairs.tokens]
    d_logits[pairs.targets] += upstream[pairs.tokens[pairs.targets]]
    if upstream_entropy is not None:
        d_logits -= p * (log_p + entropy(statistics)[pairs.tokens]) * upstream_entropy[pairs.tokens]
    return d_logits


def add_weight_gradient(kernels: ModuleType, d_logits: Tensor, hidden: Tensor, pairs: Pairs, gradient: WeightGradient) -> None:
    """Add the sum over a row's pairs of d_logit * hidden[token] to each row: deterministic without atomics.

    Args:
        kernels: Kernels of the device: cpu_kernels or triton_kernels.
        d_logits: [n], gradients of the pairs' logits.
        hidden: [T, H].
        pairs: The same n pairs.
        gradient: Where the sums go.
    """
    by_row = _by_row(pairs)
    tokens, d_logits = pairs.tokens[by_row.order].int(), d_logits[by_row.order]
    rows_at_once = max(1, _SUMS_BYTES // (hidden.shape[1] * d_logits.element_size()))
    for first in range(0, len(by_row.rows), rows_at_once):
        offsets = by_row.offsets[first : first + rows_at_once + 1]
        start, stop = int(offsets[0]), int(offsets[-1])
        sums = kernels.weighted_sums(d_logits[start:stop], hidden, tokens[start:stop], offsets - start)
        gradient.add_rows(by_row.rows[first : first + rows_at_once], sums)


@dataclass(frozen=True)
class _ByRow:
    order: Tensor  # int64 [n], pairs by row and, within one, by token
    rows: Tensor  # int32 [u], distinct
    offsets: Tensor  # int32 [u + 1], CSR over `order`


def _by_row(pairs: Pairs) -> _ByRow:
    rows, order = torch.sort(pairs.rows, stable=True)
    distinct, counts = torch.unique_consecutive(rows, return_counts=True)
    return _ByRow(order, distinct, torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int())
