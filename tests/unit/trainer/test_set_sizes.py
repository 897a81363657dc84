"""Quantiles of keep-set sizes do not depend on how a batch is split."""

from types import SimpleNamespace

import numpy as np

from megatron_rl.records import RaggedIds
from megatron_rl.trainer.set_sizes import set_size_counts, set_size_quantiles


def microbatch(sizes: list[int]) -> SimpleNamespace:
    return SimpleNamespace(keep_sets=RaggedIds.of([np.zeros(size, dtype=np.int32) for size in sizes]))


def test_they_are_those_of_all_tokens_with_a_set_however_these_are_split():
    sizes = np.random.default_rng(0).geometric(0.2, size=500).tolist()
    wanted = {
        f"keep_set_size_{name}": float(np.quantile(sizes, q, method="inverted_cdf"))
        for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
    assert set_size_quantiles([set_size_counts([microbatch([0, *sizes, 0])])]) == wanted
    split = [
        set_size_counts([microbatch(sizes[:7]), microbatch([])]),
        set_size_counts([]),
        set_size_counts([microbatch(sizes[7:])]),
    ]
    assert set_size_quantiles(split) == wanted


def test_without_sets_there_is_nothing_to_say():
    assert set_size_quantiles([set_size_counts([microbatch([0, 0])]), set_size_counts([])]) == {}
