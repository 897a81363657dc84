"""How wide the keep-sets of a step are: most are narrow, and a mean says nothing of the rest."""

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_rl.batching import Microbatch

QUANTILES = {"keep_set_size_p50": 0.5, "keep_set_size_p99": 0.99, "keep_set_size_max": 1.0}
"""By the name of the metric."""


def set_size_counts(microbatches: Iterable[Microbatch]) -> np.ndarray:
    """i64 [largest + 1]: how many loss tokens have a replayed set of each size; tokens without one are not counted."""
    sizes = [m.keep_sets.sizes for m in microbatches]
    counts = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *sizes]), minlength=1)
    counts[0] = 0
    return counts


def set_size_quantiles(of_ranks: Sequence[np.ndarray]) -> dict[str, float]:
    """Of all ranks' counts together, by the smallest size up to which at least the share of the tokens lies; {} of no sets."""
    total = np.zeros(max((len(counts) for counts in of_ranks), default=1), dtype=np.int64)
    for counts in of_ranks:
        total[: len(counts)] += counts
    reached = total.cumsum()
    if not reached[-1]:
        return {}
    return {name: float(np.searchsorted(reached, np.ceil(share * reached[-1]))) for name, share in QUANTILES.items()}
