"""Rows of token ids of different lengths in two flat arrays: the one form that keep-sets have from the server to the loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class RaggedIds:
    """T rows of token ids in compressed sparse row (CSR) form: row t is `ids[offsets[t] : offsets[t + 1]]`.

    Example: the rows [5, 7], [], [9] are ids [5, 7, 9] and offsets [0, 2, 2, 3].
    """

    ids: np.ndarray
    """i32 [nnz], the rows one after the other."""
    offsets: np.ndarray
    """i64 [T + 1], rising from 0 to nnz."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> "RaggedIds":
        """From the ids of each row."""
        ids = np.concatenate([np.zeros(0, dtype=np.int32), *rows]).astype(np.int32)
        return cls(ids, np.cumsum([0, *map(len, rows)], dtype=np.int64))

    @classmethod
    def from_sizes(cls, ids: np.ndarray, sizes: np.ndarray) -> "RaggedIds":
        """From flat ids and the length of each row.

        Args:
            ids: i32 [nnz], the rows one after the other.
            sizes: int [T].
        """
        return cls(ids, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def empty(cls, num_rows: int) -> "RaggedIds":
        """Rows without ids."""
        return cls(np.zeros(0, dtype=np.int32), np.zeros(num_rows + 1, dtype=np.int64))

    @classmethod
    def concatenate(cls, parts: Sequence["RaggedIds"]) -> "RaggedIds":
        """The rows of all parts, in order."""
        ids = np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids for part in parts)])
        return cls.from_sizes(ids, np.concatenate([np.zeros(0, dtype=np.int64), *(part.sizes for part in parts)]))

    def __len__(self) -> int:
        """T, the number of rows."""
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """i32 [size of the row], a view."""
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.ids[start:end] for start, end in pairwise(self.offsets))

    @property
    def sizes(self) -> np.ndarray:
        """i64 [T]."""
        return np.diff(self.offsets)

    def select(self, rows: np.ndarray) -> "RaggedIds":
        """Some rows, in the order given. rows: int [M]."""
        sizes = self.sizes[rows]
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        return RaggedIds(self.ids[np.repeat(self.offsets[rows] - ends[:-1], sizes) + np.arange(ends[-1])], ends)
