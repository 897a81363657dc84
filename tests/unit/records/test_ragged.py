"""Rows of different lengths in two flat arrays."""

import numpy as np

from megatron_rl.records import RaggedIds

ROWS = [[5, 7], [], [9], [1, 2, 3], []]


def as_lists(ragged):
    return [row.tolist() for row in ragged]


def test_rows_are_read_as_they_were_given():
    ragged = RaggedIds.of(ROWS)
    assert ragged.ids.tolist() == [5, 7, 9, 1, 2, 3] and ragged.offsets.tolist() == [0, 2, 2, 3, 6, 6]
    assert (ragged.ids.dtype, ragged.offsets.dtype, ragged.sizes.dtype) == (np.int32, np.int64, np.int64)
    assert len(ragged) == 5 and ragged.sizes.tolist() == [2, 0, 1, 3, 0]
    assert as_lists(ragged) == ROWS and ragged[3].tolist() == [1, 2, 3] and ragged[4].tolist() == []
    assert as_lists(RaggedIds.from_sizes(ragged.ids, ragged.sizes)) == ROWS


def test_rows_of_several_parts_one_after_the_other():
    ragged = RaggedIds.of(ROWS)
    parts = [ragged, RaggedIds.empty(2), ragged]
    assert as_lists(RaggedIds.concatenate(parts)) == [*ROWS, [], [], *ROWS]
    nothing = RaggedIds.concatenate([])
    assert (len(nothing), nothing.ids.dtype, nothing.offsets.dtype) == (0, np.int32, np.int64)


def test_some_rows_in_any_order():
    ragged = RaggedIds.of(ROWS)
    for rows in ([3, 0], [1], [], [4, 2, 2], range(5)):
        chosen = ragged.select(np.array(rows, dtype=np.int64))
        assert as_lists(chosen) == [ROWS[row] for row in rows]
        assert (chosen.ids.dtype, chosen.offsets.dtype) == (np.int32, np.int64)
