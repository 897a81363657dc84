"""Each position has one rank; the ranks have equal shares of every sequence and of the causal mask."""

from itertools import pairwise

import numpy as np
import pytest

from megatron_rl.engine.context import SequenceSlice

ENDS = [0, 8, 24, 28]


def test_the_documented_arrangement() -> None:
    assert [SequenceSlice.of([0, 8], 2, rank).own.tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("size", [1, 2])
def test_slices_laid_side_by_side_are_put_back_in_order(size: int) -> None:
    slices = [SequenceSlice.of(ENDS, size, rank) for rank in range(size)]
    values = np.random.default_rng(0).random((28, 3))
    side_by_side = np.concatenate([values[part.own] for part in slices])
    assert all(np.array_equal(side_by_side[part.place], values) for part in slices)
    assert all((np.diff(part.own) > 0).all() for part in slices)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_work(size: int) -> None:
    """Of attention: a query at place p of its sequence sees p + 1 keys."""
    ends = np.cumsum([0, 2 * size, 6 * size, 4 * size])
    place = np.concatenate([np.arange(end - start) for start, end in pairwise(ends)])
    work = {int((place[SequenceSlice.of(ends, size, rank).own] + 1).sum()) for rank in range(size)}
    assert len(work) == 1
