"""The .npy reader against numpy's own writer."""

import io

import numpy as np
import pytest

from megatron_rl.inference.vllm.npy import read_npy


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("shape", [(5, 3, 2), (7,), (0, 4, 2), ()])
def test_what_numpy_writes_is_read(dtype, shape):
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    read = read_npy(npy(array))
    assert read.dtype == array.dtype and read.shape == array.shape and (read == array).all()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"not numpy at all",
        npy(np.zeros((2, 3), dtype=np.float32)),
        npy(np.asfortranarray(np.ones((2, 3), dtype=np.uint8))),
        npy(np.arange(6, dtype=np.uint8))[:-1],
        npy(np.array([{"a": 1}], dtype=object)),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError):
        read_npy(data)
