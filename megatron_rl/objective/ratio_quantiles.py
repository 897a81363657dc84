"""Quantiles of p / p_rollout over all tokens of a step, by a histogram: counts of microbatches and ranks add up exactly, in any order.

Bins are even in asinh(d / SCALE), d = log p - log p_rollout: as fine around 0 as rounding is, and within .3 % of d farther out. The
middle one holds d = 0, so that a ratio of 1 comes out as 1.
"""

import math

import torch
from torch import Tensor

QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
"""By the name of the metric."""
SCALE = 1e-6
LIMIT = 40.0
"""|d| beyond it counts as this: e^40 is past any use of a ratio."""
HALF = 4096
NUM_BINS = 2 * HALF + 1
_WIDTH = math.asinh(LIMIT / SCALE) / HALF


def ratio_counts(d: Tensor) -> Tensor:
    """i64 [NUM_BINS] of d, f32 [M]; a NaN counts as the largest ratio, where it is seen."""
    place = torch.asinh(d.detach().double().nan_to_num(LIMIT).clamp(-LIMIT, LIMIT) / SCALE) / _WIDTH
    return torch.bincount(place.round().long() + HALF, minlength=NUM_BINS)


def ratio_quantiles(counts: Tensor) -> dict[str, float]:
    """The smallest ratio up to which at least the quantile's share of the tokens lies; {} of no tokens."""
    reached = counts.cpu().cumsum(0)
    if not reached[-1]:
        return {}
    wanted = torch.tensor([math.ceil(share * int(reached[-1])) for share in QUANTILES.values()])
    places = torch.searchsorted(reached, wanted.clamp(min=1)).tolist()
    return {name: math.exp(SCALE * math.sinh((place - HALF) * _WIDTH)) for name, place in zip(QUANTILES, places, strict=True)}
