"""The two kernels of the pair route on a CPU. Both name rows of a table in CSR and read them in place, without an [n, H] gather.

Each result is one sequential sum per output, in CSR order, so the bits depend neither on the number of threads nor on the run.
Tables of fp32 or fp64 are read directly. PyTorch's kernels would round bf16 sums (or refuse bf16), so a bf16 table is widened
first: all of it if it is small, else the distinct rows that a block of bags needs.
"""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from megatron_rl.keep_set.accumulate import accumulation_dtype

_WIDENED_BYTES = 32 << 20  # of rows that are widened at a time

with warnings.catch_warnings():  # "sparse CSR is in beta" comes once per process: here, where it is dropped
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 1], [0], [1.0], size=(1, 1), check_invariants=False)


def pair_dots(left: Tensor, table: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """The dot product left[bag of i] . table[index[i]] of each of n pairs.

    Args:
        left: [bags, H].
        table: [rows, H], of the same dtype.
        index: int32 [n], rows of the table.
        offsets: int32 [bags + 1], CSR over `index`.

    Returns:
        fp32 [n]; fp64 for fp64 tables.
    """
    if table.dtype == accumulation_dtype(table):
        return _dots(left, table, index, offsets)
    wide_left = left.to(accumulation_dtype(table))
    return torch.cat(
        [
            _dots(wide_left[bags], rows, columns, own_offsets)
            for bags, _, rows, columns, own_offsets in _widened(table, index, offsets)
        ]
    )


def weighted_sums(coefficients: Tensor, table: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """The sum over each bag's i of coefficients[i] * table[index[i]].

    Args:
        coefficients: fp32 [n]; fp64 for fp64 tables.
        table: [rows, H].
        index: int32 [n], rows of the table.
        offsets: int32 [bags + 1], CSR over `index`.

    Returns:
        [bags, H] of the coefficients' dtype; 0 for empty bags.
    """
    if table.dtype == accumulation_dtype(table):
        return _sums(coefficients, table, index, offsets)
    sums = table.new_empty(len(offsets) - 1, table.shape[1], dtype=coefficients.dtype)
    for bags, entries, rows, columns, own_offsets in _widened(table, index, offsets):
        sums[bags] = _sums(coefficients[entries], rows, columns, own_offsets)
    return sums


def _dots(left: Tensor, table: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    pattern = torch.sparse_csr_tensor(
        offsets, index, left.new_zeros(len(index)), size=(len(left), len(table)), check_invariants=False
    )
    return torch.sparse.sampled_addmm(pattern, left, table.t(), beta=0.0).values()


def _sums(coefficients: Tensor, table: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    return embedding_bag(index, table, offsets, mode="sum", per_sample_weights=coefficients, include_last_offset=True)


def _widened(table: Tensor, index: Tensor, offsets: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Blocks of bags: (bags, their entries, their distinct rows in accumulation dtype, index into these, offsets from 0)."""
    dtype = accumulation_dtype(table)
    if table.numel() * dtype.itemsize <= _WIDENED_BYTES:
        yield slice(None), slice(None), table.to(dtype), index, offsets
        return
    entries_per_block = max(1, _WIDENED_BYTES // (table.shape[1] * dtype.itemsize))
    _, bags_per_block = torch.unique_consecutive(offsets[:-1] // entries_per_block, return_counts=True)
    first = 0
    for last in bags_per_block.cumsum(0).tolist():
        entries = slice(int(offsets[first]), int(offsets[last]))
        distinct, columns = torch.unique(index[entries], return_inverse=True)
        yield slice(first, last), entries, table[distinct].to(dtype), columns.int(), offsets[first : last + 1] - entries.start
        first = last
