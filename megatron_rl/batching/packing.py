"""Sequences to data-parallel ranks to microbatches: pure, deterministic, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.topology import Layout

ATTENTION_LENGTH = 32768
"""Tokens at which attention costs as much as the rest of a layer: about 12 hidden sizes, here for one of 2700."""


class PackingError(UserError, ValueError):
    """A sequence that no microbatch can hold."""


@dataclass(frozen=True)
class Alignment:
    """What numbers of positions have to be multiples of.

    Example: with context parallelism of 2, Alignment(segment=4) pads a sequence of 5 tokens to 8 positions.
    """

    segment: int = 1
    """Each sequence is padded to a multiple of this many positions."""
    total: int = 1
    """Each microbatch is padded to a multiple of this many positions."""

    def padded(self, length: int) -> int:
        """Positions of a segment of `length` tokens."""
        return -(-length // self.segment) * self.segment

    def padded_total(self, length: int) -> int:
        """Positions of a microbatch of `length` positions."""
        return -(-length // self.total) * self.total


def alignment_of(layout: Layout, sequence_parallel: bool, rank_multiple: int = 1) -> Alignment:
    """Context parallelism cuts each segment into 2 x cp chunks.

    Sequence parallelism cuts each rank's part of the microbatch by tp.

    Args:
        layout: The parallelism layout.
        sequence_parallel: Whether activations are split along the sequence over the tensor-parallel ranks.
        rank_multiple: The positions that a rank's linear layers see are a multiple of this.
    """
    segment = 2 * layout.cp if layout.cp > 1 else 1
    ranks = layout.cp * (layout.tp if sequence_parallel else 1)
    return Alignment(segment=segment, total=lcm(segment, ranks * rank_multiple))


def costs_of(lengths: np.ndarray, attention_length: int = ATTENTION_LENGTH) -> np.ndarray:
    """f64 [n], in tokens: the linear layers' work plus attention's, which grows with the square."""
    exact = np.asarray(lengths, dtype=np.float64)
    return exact + exact**2 / attention_length


def pack(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    microbatch_multiple: int = 1,
    attention_length: int = ATTENTION_LENGTH,
) -> list[list[list[int]]]:
    """Pack sequences into the microbatches of the data-parallel ranks; pure and deterministic.

    Every sequence is in exactly one microbatch. All ranks have the same number of microbatches: the smallest for which the greedy
    filling
    succeeds: longest first, each into the cheapest that has room. A microbatch may be empty.

    Args:
        lengths: Tokens of each sequence.
        num_ranks: Data-parallel ranks.
        max_tokens: Tokens that a microbatch holds at most; the alignment's padding is added to them.
        microbatch_multiple: The number of microbatches is a multiple of it: the pipeline stages, where they are interleaved.
        attention_length: Attention length of the cost model, see ATTENTION_LENGTH.

    Returns:
        [data-parallel rank][microbatch] to sequence numbers, rising. Example: lengths [9, 4, 5, 2] on 2 ranks at max_tokens 10
        give [[[0], [3]], [[2], [1]]].

    Raises:
        PackingError: A sequence is longer than max_tokens.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if (sizes > max_tokens).any():
        worst = int(sizes.argmax())
        remedy = "raise trainer.max_tokens_per_microbatch"
        raise PackingError(f"sequence {worst} has {sizes[worst]} tokens, a microbatch holds {max_tokens}: {remedy}")
    costs = costs_of(sizes, attention_length)
    per_rank = _round_up(max(1, -(-int(sizes.sum()) // (max_tokens * num_ranks))), microbatch_multiple)
    while (bins := _fill(sizes, costs, per_rank * num_ranks, max_tokens)) is None:
        per_rank += microbatch_multiple
    return _assign(bins, [float(costs[members].sum()) for members in bins], num_ranks)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _fill(sizes: np.ndarray, costs: np.ndarray, num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Sequence numbers of each bin, or None when a sequence found no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    used, cost = np.zeros(num_bins, dtype=np.int64), np.zeros(num_bins)
    for number in np.argsort(-sizes, kind="stable"):
        candidates = np.where(used + sizes[number] <= max_tokens, cost, np.inf)
        best = int(candidates.argmin())
        if candidates[best] == np.inf:
            return None
        bins[best].append(int(number))
        used[best] += sizes[number]
        cost[best] += costs[number]
    return [sorted(members) for members in bins]


def _assign(bins: list[list[int]], costs: list[float], num_ranks: int) -> list[list[list[int]]]:
    """Bins to ranks, in rounds of similar cost, most expensive first, every other round in reverse order.

    Ranks communicate in each microbatch (the experts' all-to-all), so k-th microbatches should be alike before the totals are.
    """
    order = sorted(range(len(bins)), key=lambda b: (-costs[b], b))
    rounds = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    in_turn = [members[::-1] if k % 2 else members for k, members in enumerate(rounds)]
    return [[bins[members[rank]] for members in in_turn] for rank in range(num_ranks)]
