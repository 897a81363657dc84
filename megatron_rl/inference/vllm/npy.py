"""An integer array out of the bytes of a .npy file.

numpy.load evaluates the header by `ast`, whose parser fails at random in CPython 3.11 while another thread parses too ("AST
constructor recursion depth mismatch"), as reward functions do. The header of an array of integers has one form: it is matched.
"""

import re

import numpy as np

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(rb"\{'descr': '([|<]u[12]|[|<]i[1248])', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \}\s*")


def read_npy(data: bytes) -> np.ndarray:
    """A read-only view of `data` as the C-ordered array of integers that it holds. Raises ValueError for anything else."""
    if data[:6] != _MAGIC or len(data) < 12:
        raise ValueError("not a .npy file")
    size_bytes = 2 if data[6] == 1 else 4  # version 1.0 holds the header's length in two bytes, later ones in four
    start = 8 + size_bytes
    end = start + int.from_bytes(data[8:start], "little")
    header = _HEADER.fullmatch(data[start:end])
    if header is None:
        raise ValueError(f"no C-ordered array of integers: header {data[start:end][:120]!r}")
    shape = tuple(int(size) for size in header[2].split(b",") if size.strip())
    array = np.frombuffer(data, dtype=np.dtype(header[1].decode()), offset=end)
    if array.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{array.size} values for the shape {shape}")
    return array.reshape(shape)
