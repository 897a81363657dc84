"""One interface to whatever quantises matrices: this project's own functions, or a library's kernel that gives the same bytes."""

from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.precision.nvfp4 import BLOCK, Nvfp4, amax_of, fake_quantise, quantise


class MatrixQuantiser(Protocol):
    """Quantises matrices [outputs, inputs] to the bytes that servers get."""

    name: str
    """For the log."""

    def quantise(self, matrix: Tensor, amax: Tensor) -> Nvfp4:
        """Same as nvfp4.quantise."""

    def fake_quantise(self, matrix: Tensor, amax: Tensor) -> Tensor:
        """Same as nvfp4.fake_quantise."""


class TorchQuantiser:
    """This project's own functions, on any device."""

    name = "PyTorch"

    def quantise(self, matrix: Tensor, amax: Tensor) -> Nvfp4:
        """See nvfp4.quantise."""
        return quantise(matrix, amax)

    def fake_quantise(self, matrix: Tensor, amax: Tensor) -> Tensor:
        """See nvfp4.fake_quantise."""
        return fake_quantise(matrix, amax)


def difference_of(kernel: MatrixQuantiser, device: torch.device) -> str | None:
    """What a kernel gives other than this project's functions; None if it gives the same bytes.

    The matrix has what kernels are known to differ in: values on ties, blocks of zeros, of -0, with a subnormal scale and with a
    scale that underflows, and a global scale that is larger than the matrix needs.
    """
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(128, 16 * BLOCK, generator=generator)
    magnitudes = 2.0 ** -torch.arange(32.0).repeat_interleave(4)
    blocks = matrix.unflatten(-1, (-1, BLOCK)) * magnitudes[:, None, None]
    blocks[0, 0], blocks[1, 1], blocks[2, 2, ::2] = 0.0, -0.0, -0.0
    blocks[3, 3] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2) / 16
    matrix = blocks.flatten(-2).to(torch.bfloat16).to(device)
    for factor in (1.0, 1.7):
        amax = amax_of(matrix) * factor
        wanted, found = quantise(matrix, amax), kernel.quantise(matrix, amax)
        parts = {
            "block scales": (wanted.block_scales.view(torch.uint8), found.block_scales.view(torch.uint8)),
            "packed values": (wanted.packed, found.packed),
            "global scale": (wanted.global_scale.reshape(1), found.global_scale.reshape(1)),
        }
        for name, (one, other) in parts.items():
            if not torch.equal(one, other):
                return f"{int((one != other).sum())} of {one.numel()} {name}"
    return None
