"""The two kernels of the pair route for GPUs, in Triton.

NOT YET RUN ON HARDWARE. Their logic is tested in Triton's interpreter (tests/unit/keep_set/test_triton_kernels.py); tests/gpu
compares them with the reference on a GPU where there is one, and scripts/bench_keep_set.py --device cuda measures them. Block
sizes are guesses.

As on the CPU, rows of the table are read in place, and each result is one program's sum in a fixed order: no atomics, so the
bits do not change from run to run. Rows are read in the training dtype, products and sums are fp32 (fp64 for fp64 tables).
"""

# Triton reads the annotations of a kernel's arguments: pointers and numbers have none.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.keep_set.accumulate import accumulation_dtype

_PAIRS = 16  # pairs of one program
_COLUMNS = 128  # hidden columns at a time
_TRITON_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


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
    left, table = left.contiguous(), table.contiguous()
    num_pairs, width = len(index), table.shape[1]
    dots = table.new_empty(num_pairs, dtype=accumulation_dtype(table))
    if num_pairs:
        bag = torch.repeat_interleave(torch.arange(len(left), device=left.device), offsets.diff(), output_size=num_pairs)
        grid = (triton.cdiv(num_pairs, _PAIRS),)
        _pair_dots[grid](left, table, index, bag, dots, num_pairs, width, _PAIRS, _COLUMNS, _TRITON_DTYPE[dots.dtype])
    return dots


@triton.jit
def _pair_dots(left, table, index, bag, dots, num_pairs, width, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """One program: PAIRS pairs, all columns. Neighbouring pairs share their left row, which the cache holds."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pair < num_pairs
    left_row = tl.load(bag + pair, mask=is_pair, other=0).to(tl.int64)  # row * width may exceed 32 bits
    table_row = tl.load(index + pair, mask=is_pair, other=0).to(tl.int64)
    total = tl.zeros([PAIRS], dtype=DTYPE)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_inside = is_pair[:, None] & (column < width)[None, :]
        a = tl.load(left + left_row[:, None] * width + column[None, :], mask=is_inside, other=0.0).to(DTYPE)
        b = tl.load(table + table_row[:, None] * width + column[None, :], mask=is_inside, other=0.0).to(DTYPE)
        total += tl.sum(a * b, axis=1)
    tl.store(dots + pair, total, mask=is_pair)


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
    table, num_bags, width = table.contiguous(), len(offsets) - 1, table.shape[1]
    sums = table.new_empty(num_bags, width, dtype=accumulation_dtype(table))
    if num_bags:
        grid = (num_bags, triton.cdiv(width, _COLUMNS))
        _weighted_sums[grid](coefficients, table, index, offsets, sums, width, _PAIRS, _COLUMNS, _TRITON_DTYPE[sums.dtype])
    return sums


@triton.jit
def _weighted_sums(
    coefficients, table, index, offsets, sums, width, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr
):
    """One program: one bag, COLUMNS columns; its rows are read PAIRS at a time, so that the longest bag does not set the time."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    begin, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    total = tl.zeros([COLUMNS], dtype=DTYPE)
    for first in range(begin, end, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        is_pair = pair < end
        row = tl.load(index + pair, mask=is_pair, other=0).to(tl.int64)
        factor = tl.load(coefficients + pair, mask=is_pair, other=0.0).to(DTYPE)
        is_inside = is_pair[:, None] & is_column[None, :]
        values = tl.load(table + row[:, None] * width + column[None, :], mask=is_inside, other=0.0).to(DTYPE)
        total += tl.sum(factor[:, None] * values, axis=0)
    tl.store(sums + bag * width + column, total, mask=is_column)
