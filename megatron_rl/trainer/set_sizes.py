"""Sizes of a step's keep-sets, as quantiles: most sets are small, and a mean hides the others."""

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_rl.batching import Microbatch

QUANTILES = {"keep_set_size_p50": 0.5, "keep_set_size_p99": 0.99, "keep_set_size_max": 1.0}
"""By the name of the metric."""


def set_size_counts(microbatches: Iterable[Microbatch]) -> np.ndarray:
    """i64 [largest size + 1]: the number of loss tokens with a replayed set of each size; tokens without one are not counted."""
    sizes = [m.keep_sets.sizes for m in microbatches]
    counts = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *sizes]), minlength=1)
    counts[0] = 0
    return counts


def set_size_quantiles(of_ranks: Sequence[np.ndarray]) -> dict[str, float]:
    """Quantiles over all ranks' tokens: the smallest size that this share of the tokens does not exceed; {} of no sets."""
    total = np.zeros(max((len(counts) for counts in of_ranks), default=1), dtype=np.int64)
    for counts in of_ranks:
        total[: len(counts)] += counts
    reached = total.cumsum()
    if not reached[-1]:
        return {}
    return {name: float(np.searchsorted(reached, np.ceil(share * reached[-1]))) for name, share in QUANTILES.items()}
