"""Which positions of a microbatch a rank holds.

With `size` context-parallel ranks every segment is cut into 2 x size chunks; rank r holds the chunks r and 2 x size - 1 - r of
each, so that all ranks have the same share of the causal mask's work. For size 2 and a segment of 8:

    position   0 1 2 3 4 5 6 7
    rank       0 0 1 1 1 1 0 0

This is Transformer Engine's arrangement, too. Sequence parallelism cuts what a context-parallel rank holds into as many runs as
there are tensor-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from megatron_rl.topology import Layout, RankCoords


@dataclass(frozen=True)
class SequenceSlice:
    """The positions of one rank, out of a microbatch's N."""

    own: np.ndarray
    """i64 [N / size], rising."""
    place: np.ndarray
    """i64 [N]: where each position stands when the slices of all ranks lie one after the other."""

    @classmethod
    def of(cls, segment_ends: Sequence[int] | np.ndarray, size: int, rank: int) -> "SequenceSlice":
        """segment_ends: from 0 to N; each segment's length is a multiple of 2 x size, unless size is 1."""
        return _slice_of(tuple(map(int, segment_ends)), size, rank)


@lru_cache(maxsize=64)
def _slice_of(segment_ends: tuple[int, ...], size: int, rank: int) -> SequenceSlice:
    """Every layer of a microbatch asks for the same one, in the forward pass and in the recomputation."""
    held = [_held(segment_ends, size, other) for other in range(size)]
    return SequenceSlice(held[rank], np.argsort(np.concatenate(held)))


def _held(segment_ends: tuple[int, ...], size: int, rank: int) -> np.ndarray:
    if size == 1:
        return np.arange(segment_ends[-1])
    parts = []
    for start, end in pairwise(segment_ends):
        chunk = (end - start) // (2 * size)
        parts += [start + chunk * number + np.arange(chunk) for number in (rank, 2 * size - 1 - rank)]
    return np.concatenate(parts)


def routed_positions(
    segment_ends: Sequence[int] | np.ndarray, layout: Layout, coords: RankCoords, *, sequence_parallel: bool
) -> np.ndarray:
    """i64 [T], rising: the positions whose tokens this rank's routers see."""
    own = SequenceSlice.of(segment_ends, layout.cp, coords.cp).own
    return np.split(own, layout.tp)[coords.tp] if sequence_parallel else own
