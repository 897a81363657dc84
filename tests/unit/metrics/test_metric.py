"""Reductions: parts put together give what the whole gives, whatever the split."""

import math
from itertools import pairwise

import numpy as np
import pytest

from megatron_rl.metrics import Metric, merge, to_floats


def measured(values):
    return {
        "mean": Metric("mean", float(np.sum(values)), len(values)),
        "sum": Metric("sum", float(np.sum(values)), len(values)),
        "max": Metric("max", max(values), len(values)) if len(values) else Metric("max", 0.0, 0),
        "min": Metric("min", min(values), len(values)) if len(values) else Metric("min", 0.0, 0),
        "last": Metric("last", values[-1]) if len(values) else Metric("last", 0.0, 0),
    }


@pytest.mark.parametrize("bounds", [[0, 12], [0, 1, 12], [0, 5, 5, 7, 12], [0, 0, 12, 12]])
def test_any_split_gives_the_whole(bounds):
    values = np.random.default_rng(0).normal(size=12) - 5.0  # all negative: an empty part's 0 must not be the maximum
    parts = [measured(values[a:b].tolist()) for a, b in pairwise(bounds)]
    expected = {"mean": values.mean(), "sum": values.sum(), "max": values.max(), "min": values.min(), "last": values[-1]}
    assert to_floats(merge(parts)) == pytest.approx(expected, abs=1e-12)


def test_means_are_weighted_by_their_counts():
    parts = [{"x": Metric("mean", 1.0, 1)}, {"x": Metric("mean", 9.0, 3)}, {"y": Metric("mean", 4.0, 2)}]
    assert to_floats(merge(parts)) == {"x": 2.5, "y": 2.0}


def test_what_measured_nothing_is_not_reported():
    assert to_floats({"x": Metric("mean", 0.0, 0), "y": Metric("max", 0.0, 0), "z": Metric("sum", 0.0)}) == {"z": 0.0}
    assert merge([]) == {}


def test_one_name_has_one_reduction():
    with pytest.raises(ValueError, match="metric x is a mean in one part and a max in another"):
        merge([{"x": Metric("mean", 1.0)}, {"x": Metric("max", 1.0)}])


def test_a_nan_spoils_the_whole_and_is_not_lost():
    for reduction in ("mean", "sum", "max", "min"):
        for parts in ([math.nan, 1.0], [1.0, math.nan]):
            merged = merge([{"x": Metric(reduction, value)} for value in parts])
            assert math.isnan(merged["x"].value), (reduction, parts)
