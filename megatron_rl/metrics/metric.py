"""A metric with its reduction, so that values of microbatches and ranks are merged exactly."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True)
class Metric:
    """One measured value. mean: `total` / `count`; sum: `total`; max, min, last: `total` is the value. count 0: not measured.

    Example: the mean of 3 tokens' |d log p| that sum to .6 is Metric("mean", .6, 3).
    """

    reduction: Reduction
    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        """The reduced value. A mean over nothing raises ZeroDivisionError; `to_floats` leaves such metrics out."""
        return self.total / self.count if self.reduction == "mean" else self.total


Metrics = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of several microbatches or ranks.

    Args:
        parts: In the order that 'last' refers to; a name may be missing in some of them.

    Raises:
        ValueError: Two parts reduce the same name differently: a bug.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge_two(name, merged[name], metric) if name in merged else metric
    return merged


def to_floats(metrics: Metrics) -> dict[str, float]:
    """The values of the metrics that were measured."""
    return {name: float(metric.value) for name, metric in metrics.items() if metric.count}


def _merge_two(name: str, a: Metric, b: Metric) -> Metric:
    if a.reduction != b.reduction:
        raise ValueError(f"metric {name} is a {a.reduction} in one part and a {b.reduction} in another; a name has one reduction")
    if not b.count or not a.count:  # a part that measured nothing must not enter a maximum
        return a if a.count else b
    if a.reduction in ("mean", "sum"):
        return Metric(a.reduction, a.total + b.total, a.count + b.count)
    if a.reduction == "last":
        return b
    extreme = np.maximum if a.reduction == "max" else np.minimum  # unlike max(), they keep a NaN of either side
    return Metric(a.reduction, float(extreme(a.total, b.total)), a.count + b.count)
