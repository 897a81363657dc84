"""Byte for byte against the quantisers of ModelOpt and compressed-tensors: where they agree, and each cause of a difference.

The table of differences in docs/nvfp4.md is this file in words.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_rl.precision import amax_of, encoding_scale, quantise
from megatron_rl.precision.nvfp4 import unpack

Bytes = tuple[Tensor, Tensor]
"""Codes u8 [outputs, inputs] and the bits of the block scales, u8 [outputs, inputs / 16]."""
SEEDS = range(4)


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(48, 128, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def ours(matrix: Tensor) -> Bytes:
    found = quantise(matrix, amax_of(matrix))
    return unpack(found.packed), found.block_scales.view(torch.uint8)


def share(left: Tensor, right: Tensor) -> float:
    return float((left != right).double().mean())


def one_step_apart(left: Tensor, right: Tensor) -> bool:
    return bool(((left & 7).int() - (right & 7).int()).abs().max() <= 1)


class CompressedTensors:
    def __init__(self) -> None:
        quantization = pytest.importorskip("compressed_tensors.quantization")
        self._arguments = quantization.QuantizationArgs(
            num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
        )
        self._scheme = quantization.QuantizationScheme(targets=["Linear"], weights=self._arguments)

    def global_scale(self, matrix: Tensor) -> Tensor:
        from compressed_tensors.quantization.utils import generate_gparam

        return generate_gparam(*matrix.aminmax())

    def __call__(self, matrix: Tensor, global_scale: Tensor | None = None) -> Bytes:
        from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        global_scale = self.global_scale(matrix) if global_scale is None else global_scale
        blocks = matrix.unflatten(-1, (-1, 16))
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), self._arguments, global_scale=global_scale)
        parts = {"weight": matrix, "weight_scale": scales, "weight_global_scale": global_scale}
        found = NVFP4PackedCompressor.compress(parts, self._scheme)
        return unpack(found["weight_packed"]), found["weight_scale"].view(torch.uint8)


@pytest.fixture
def compressed_tensors() -> Iterator[CompressedTensors]:
    with torch.compiler.set_stance("force_eager"):  # its rounding is a compiled function: no C++ compiler is needed for these few
        yield CompressedTensors()


@pytest.fixture
def modelopt():
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")

    def quantised(matrix: Tensor) -> Bytes:
        found, scales, _ = qtensor.NVFP4QTensor.quantize(matrix.clone(), 16)
        return unpack(found._quantized_data), scales.view(torch.uint8)

    return quantised


@pytest.mark.parametrize("seed", SEEDS)
def test_compressed_tensors_has_our_bytes_for_fp32_weights(compressed_tensors: CompressedTensors, seed: int) -> None:
    matrix = weights(seed, torch.float32)
    (codes, scales), (their_codes, their_scales) = ours(matrix), compressed_tensors(matrix)
    # Another order of the same formula: a scale or a code may fall on the other side of a tie now and then.
    assert share(codes, their_codes) < 1e-3 and share(scales, their_scales) < 1e-2


def test_compressed_tensors_rounds_scales_of_bf16_weights_to_bf16(compressed_tensors: CompressedTensors) -> None:
    """Its global scale and block scales are computed in the weights' dtype; in fp32, nearly all of the difference is gone."""
    in_bf16, in_fp32 = [], []
    for matrix in map(weights, SEEDS):
        their_scale = compressed_tensors.global_scale(matrix)
        assert torch.equal(their_scale, their_scale.to(torch.bfloat16).float())
        assert abs(float(their_scale / encoding_scale(amax_of(matrix))) - 1) < 2**-8
        (codes, scales), (their_codes, their_scales) = ours(matrix), compressed_tensors(matrix)
        assert one_step_apart(codes, their_codes)
        in_bf16.append(share(codes, their_codes) + share(scales, their_scales))
        in_fp32.append(sum(map(share, (codes, scales), compressed_tensors(matrix.float()))))
    assert 0 < max(in_bf16) < 0.2
    assert sum(in_fp32) < sum(in_bf16) / 4


def test_compressed_tensors_gives_zero_blocks_a_scale_and_zeros_no_sign(compressed_tensors: CompressedTensors) -> None:
    matrix = weights(0, torch.float32)
    matrix[:8, :16] = 0.0
    matrix[9, :16] = -0.0
    (codes, scales), (their_codes, their_scales) = ours(matrix), compressed_tensors(matrix)
    assert not scales[:8, 0].any() and (their_scales[:8, 0].view(torch.float8_e4m3fn).float() == 0.125).all()
    assert (codes[9, :16] == 8).all() and not their_codes[9, :16].any()
    assert torch.equal(codes[:8], their_codes[:8])  # both mean 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", SEEDS)
def test_modelopt_differs_on_ties_alone(modelopt, seed: int, dtype: torch.dtype) -> None:
    matrix = weights(seed, dtype)
    (codes, scales), (their_codes, their_scales) = ours(matrix), modelopt(matrix)
    assert share(codes, their_codes) < 0.02 and share(scales, their_scales) < 0.02 and one_step_apart(codes, their_codes)


def test_modelopt_lets_no_scale_underflow_and_zeros_have_no_sign(modelopt) -> None:
    matrix = weights(0, torch.float32)
    matrix[:8, :16] = 0.0
    matrix[9, :16] = -0.0
    matrix[10, :16] = 1e-9
    (codes, scales), (their_codes, their_scales) = ours(matrix), modelopt(matrix)
    theirs = their_scales.view(torch.float8_e4m3fn).float()
    assert not scales[:11, 0][[0, 9, 10]].any() and theirs[0, 0] == 1.0 and theirs[10, 0] == 2**-9
    assert (codes[9, :16] == 8).all() and not their_codes[9, :16].any()
    # A scale of 0 makes every value 0, whatever its code says; theirs rounds to 0.
    assert (codes[10, :16] == 7).all() and not their_codes[10, :16].any()
