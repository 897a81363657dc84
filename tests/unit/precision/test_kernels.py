"""The comparison that decides whether a library's kernel may quantise in the place of this project's functions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl.precision import Nvfp4, TorchQuantiser, amax_of, difference_of, quantise

CPU = torch.device("cpu")


class Wrong(TorchQuantiser):
    """A kernel with one of the faults that kernels are known for."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def quantise(self, matrix: Tensor, amax: Tensor) -> Nvfp4:
        if self.fault == "amax of its own":
            return quantise(matrix, amax_of(matrix))
        if self.fault == "scales of 16 x 16":
            blocks = matrix.abs().unflatten(0, (-1, 16)).unflatten(-1, (-1, 16)).amax((1, 3))
            square = blocks.repeat_interleave(16, 0)
            found = quantise(matrix, amax)
            encoding = 2688.0 / amax / 6.0
            return replace(found, block_scales=(square.float() * encoding).clamp(max=448.0).to(torch.float8_e4m3fn))
        found = quantise(matrix, amax)
        if self.fault == "reciprocal of the global scale":
            return replace(found, global_scale=1.0 / found.global_scale)
        return replace(found, packed=torch.where(found.packed == 0x88, 0, found.packed))  # loses the sign of -0


def test_the_same_bytes_are_no_difference() -> None:
    assert difference_of(TorchQuantiser(), CPU) is None


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("amax of its own", "block scales"),
        ("scales of 16 x 16", "block scales"),
        ("reciprocal of the global scale", "global scale"),
        ("sign of zero", "packed values"),
    ],
)
def test_a_fault_is_named(fault: str, part: str) -> None:
    difference = difference_of(Wrong(fault), CPU)
    assert difference is not None
    assert difference.endswith(part)
