"""NVFP4 bytes against Transformer Engine's pure-torch reference quantiser, to the bit.

Its results on matrices that are made here are kept (tests/data/gpu_contracts.json); nothing of its code is. That the reference
still gives them is in the slow test of test_gpu_contracts.py, and that a GPU's kernel does is not shown by either.
"""

import base64
import zlib

import pytest
import torch
from torch import Tensor

from megatron_rl.precision import amax_of, quantise
from megatron_rl.precision.nvfp4 import unpack
from scripts.contracts.nvfp4_matrices import fused, matrices
from tests.contracts.kept import DERIVE, FACTS

REFERENCE = FACTS["nvfp4"]["reference"]


def kept(name: str, part: str, shape: tuple[int, ...]) -> Tensor:
    """The bytes of one tensor."""
    data = bytearray(zlib.decompress(base64.b85decode(REFERENCE[name][part])))
    return torch.frombuffer(data, dtype=torch.uint8).view(shape)


def reference(name: str, rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Packed values and block scales of a matrix of this shape."""
    assert name in REFERENCE, DERIVE
    return kept(name, "packed", (rows, inputs // 2)), kept(name, "block_scales", (rows, inputs // 16))


@pytest.mark.parametrize("name", matrices())
def test_bytes_are_the_references(name: str) -> None:
    matrix = matrices()[name]
    packed, scales = reference(name, *matrix.shape)
    found = quantise(matrix, amax_of(matrix))
    assert torch.equal(found.block_scales.view(torch.uint8), scales)
    assert torch.equal(found.packed, packed)


@pytest.mark.parametrize("name", fused())
def test_parts_of_what_is_fused_have_the_bytes_of_the_fused_matrix(name: str) -> None:
    parts = fused()[name]
    amax = torch.stack([amax_of(part) for part in parts]).max()
    packed, scales = reference(name, sum(len(part) for part in parts), parts[0].shape[1])
    start = 0
    for part in parts:
        found, rows = quantise(part, amax), slice(start, start + len(part))
        assert torch.equal(found.packed, packed[rows])
        assert torch.equal(found.block_scales.view(torch.uint8), scales[rows])
        start += len(part)
    alone = [quantise(part, amax_of(part)) for part in parts]
    assert any(not torch.equal(a.packed, quantise(part, amax).packed) for a, part in zip(alone, parts, strict=True))


def test_the_pretraining_recipes_square_scales_are_other_bytes() -> None:
    """Why native training does not take Transformer Engine's own recipe."""
    matrix = matrices()["normal"]
    packed, scales = reference("normal, 16 x 16", *matrix.shape)
    found = quantise(matrix, amax_of(matrix))
    assert (found.block_scales.view(torch.uint8) != scales).double().mean() > 0.5
    assert (unpack(found.packed) != unpack(packed)).double().mean() > 0.1


def test_the_matrices_hold_what_quantisers_are_known_to_differ_in() -> None:
    """Subnormal and underflowing scales, the largest scale, zeros, every code; and no -0, whose sign the reference drops."""
    scales = torch.cat([quantise(m, amax_of(m)).block_scales.flatten().float() for m in matrices().values()])
    assert ((scales > 0) & (scales < 2.0**-6)).any()
    assert (scales == 0).any()
    assert (scales == 448).any()
    codes = torch.cat([unpack(quantise(m, amax_of(m)).packed).flatten() for m in matrices().values()])
    assert set(codes.tolist()) == set(range(16))
    for matrix in (*matrices().values(), *(part for parts in fused().values() for part in parts)):
        assert not (torch.signbit(matrix) & (matrix == 0)).any()


def test_layers_multiply_fp4_forward_and_full_precision_backward() -> None:
    """The products of Megatron's layers over Transformer Engine's Python; what they give was compared when they were derived."""
    products = FACTS["nvfp4"]["products"]
    assert FACTS["nvfp4"]["problems"] == []
    one = ["fp4 TN", "full NN", "full NT"]
    experts = ["fp4 TN", "fp4 TN", "full NN", "full NN", "full NT", "full NT"]
    assert products == {"column": one, "norm and column": one, "row": one, "experts": experts}
