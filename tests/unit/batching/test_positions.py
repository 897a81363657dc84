"""Each position has one rank; the ranks have equal shares of every sequence and of the causal mask."""

from itertools import pairwise

import numpy as np
import pytest

from megatron_rl.batching import SequenceSlice, routed_positions
from megatron_rl.topology import Layout

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


@pytest.mark.parametrize("layout", [Layout(4, tp=2, cp=2), Layout(4, tp=4), Layout(8, tp=2, cp=2, ep=2)], ids=str)
def test_with_sequence_parallelism_each_token_is_routed_on_one_rank_of_a_replica(layout: Layout) -> None:
    ends = [0, 8, 24, 32]
    ranks = [layout.coords_of(rank) for rank in range(layout.world_size)]
    cut = [routed_positions(ends, layout, coords, sequence_parallel=True).tolist() for coords in ranks if coords.dp == 0]
    assert sorted(position for part in cut for position in part) == list(range(32))
    whole = {tuple(routed_positions(ends, layout, coords, sequence_parallel=False)) for coords in ranks if coords.cp == 1}
    if layout.cp == 2:  # all tensor-parallel ranks see the same tokens: chunks 1 and 2 of four
        assert whole == {(2, 3, 4, 5, *range(12, 20), 26, 27, 28, 29)}
