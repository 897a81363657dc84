"""Quantiles of p / p_rollout over all tokens of a step, by a histogram: counts add up exactly, in any order.

Bins are even in asinh(d / SCALE), d = log p - log p_rollout: as fine around 0 as rounding is, and within .3 % of d farther out.
The middle one holds d = 0, so that a ratio of 1 gives exactly 1.
"""

import math

import torch
from torch import Tensor

QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
"""By the name of the metric."""
SCALE = 1e-6
LIMIT = 40.0
"""A larger |d| counts as this: e^40 is beyond any use of a ratio."""
HALF = 4096
NUM_BINS = 2 * HALF + 1
_WIDTH = math.asinh(LIMIT / SCALE) / HALF


def ratio_counts(d: Tensor) -> Tensor:
    """The histogram, i64 [NUM_BINS], of d, f32 [M]. A NaN counts as the largest ratio, so that it shows."""
    place = torch.asinh(d.detach().double().nan_to_num(LIMIT).clamp(-LIMIT, LIMIT) / SCALE) / _WIDTH
    return torch.bincount(place.round().long() + HALF, minlength=NUM_BINS)


def ratio_quantiles(counts: Tensor) -> dict[str, float]:
    """Quantiles by the names of their metrics: the smallest ratio that at least this share of the tokens does not exceed.

    Args:
        counts: i64 [NUM_BINS], summed over microbatches and ranks.

    Returns:
        Nothing where no token was counted.
    """
    reached = counts.cpu().cumsum(0)
    if not reached[-1]:
        return {}
    wanted = torch.tensor([math.ceil(share * int(reached[-1])) for share in QUANTILES.values()])
    places = torch.searchsorted(reached, wanted.clamp(min=1)).tolist()
    return {name: math.exp(SCALE * math.sinh((place - HALF) * _WIDTH)) for name, place in zip(QUANTILES, places, strict=True)}
