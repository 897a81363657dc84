"""NVFP4 bytes: against a scalar reference in exact arithmetic, where roundings differ, and against other libraries."""

import math
import struct

import numpy as np
import pytest
import torch

from megatron_rl.precision import QuantisationError, amax_of, dequantise, encoding_scale, fake_quantise, quantise
from megatron_rl.precision.nvfp4 import MAGNITUDES, codes_of, pack, unpack

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
ROUNDED_TIES = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def e4m3_values() -> list[float]:
    """All finite, non-negative E4M3 numbers in order, from the format's definition."""
    found = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    found += [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return found[:-1]  # the last pattern is NaN


E4M3 = e4m3_values()


def nearest(value: float, grid: list[float] | tuple[float, ...]) -> int:
    """Index of the nearest grid value, ties to the even index, the last one for all beyond; exact for fp32 inputs."""
    above = next((i for i, g in enumerate(grid) if g >= value), len(grid) - 1)
    below = max(0, above - 1)
    if value >= grid[above]:
        return above
    low, high = value - grid[below], grid[above] - value
    return below if low < high or (low == high and below % 2 == 0) else above


def scalar_reference(matrix: torch.Tensor, amax: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and block scales, one number at a time, in numpy's fp32."""
    f32, top = np.float32, np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        encoding = f32(1) if amax == 0 else min(f32(2688) / f32(amax), top)
        decoding = f32(1) / encoding
        codes, scales = np.zeros(tuple(matrix.shape), np.uint8), np.zeros((matrix.shape[0], matrix.shape[1] // 16), np.float32)
        for row, values in enumerate(matrix.to(torch.float32).numpy()):
            for block in range(scales.shape[1]):
                part = values[16 * block : 16 * block + 16]
                scale = f32(E4M3[nearest(float(np.abs(part).max() * (encoding * (f32(1) / f32(6)))), E4M3)])
                factor = min(f32(1) / (scale * decoding), top)
                scales[row, block] = scale
                for column, value in enumerate(part):
                    scaled = min(max(value * factor, f32(-6)), f32(6))
                    sign = 8 if math.copysign(1.0, scaled) < 0 else 0
                    codes[row, 16 * block + column] = nearest(abs(float(scaled)), MAGNITUDES) | sign
    return codes, scales


def matrices() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(7, 48, generator=generator) * 0.02
    outlier = normal.clone()
    outlier[3, 17] = 3e4
    zero_rows = normal.clone()
    zero_rows[2] = 0.0
    negative_zero = normal.clone()
    negative_zero[1, ::3] = -0.0
    underflow = normal.clone()
    underflow[:, :16] *= 1e-9
    return {
        "normal": normal,
        "bf16": normal.to(torch.bfloat16),
        "outlier": outlier,
        "zero rows": zero_rows,
        "all zero": torch.zeros(2, 32),
        "negative zero": negative_zero,
        "underflow": underflow,
        "amax 1e-30": normal / normal.abs().max() * 1e-30,
        "amax 1e-37": normal / normal.abs().max() * 1e-37,
        "large": normal / normal.abs().max() * 1e38,
    }


@pytest.mark.parametrize("name", matrices())
def test_bytes_are_those_of_the_definition(name: str) -> None:
    matrix = matrices()[name]
    quantised = quantise(matrix, amax_of(matrix))
    codes, scales = scalar_reference(matrix, float(amax_of(matrix)))
    assert np.array_equal(unpack(quantised.packed).numpy(), codes)
    assert np.array_equal(quantised.block_scales.float().numpy(), scales)


@pytest.mark.parametrize("name", matrices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantisation_gives_the_unpacked_values(name: str, dtype: torch.dtype) -> None:
    matrix = matrices()[name].to(dtype)
    amax = amax_of(matrix)
    assert_same_bits(fake_quantise(matrix, amax), dequantise(quantise(matrix, amax), dtype))


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    """torch.equal takes -0 for 0."""
    assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code(sign: float) -> None:
    # amax 6 * 448 makes every factor exactly 1 where a block's largest is 6.
    matrix = sign * torch.tensor([[*TIES, *MAGNITUDES, 6.0]])
    values = fake_quantise(matrix, torch.tensor(2688.0))
    assert values.tolist() == [[sign * v for v in (*ROUNDED_TIES, *MAGNITUDES, 6.0)]]
    # The neighbours of a tie in fp32 go to their own sides.
    for tie in TIES:
        bits = struct.unpack("I", struct.pack("f", tie))[0]
        pair = [struct.unpack("f", struct.pack("I", bits + step))[0] for step in (-1, 1)]
        row = torch.tensor([[*pair, *[6.0] * 14]]) * sign
        low, high = fake_quantise(row, torch.tensor(2688.0)).abs()[0, :2].tolist()
        assert (low, high) == (max(m for m in MAGNITUDES if m < tie), min(m for m in MAGNITUDES if m > tie))


def test_bytes_by_hand() -> None:
    """1 and -0.5 beside zeros: amax 1, block scale 448, factor 6 (as fp32 has it): codes 7 and 8 + 5."""
    matrix = torch.zeros(1, 16)
    matrix[0, 0], matrix[0, 1], matrix[0, 2] = 1.0, -0.5, -0.0
    quantised = quantise(matrix, amax_of(matrix))
    assert quantised.packed[0].tolist() == [0xD7, 0x08, 0, 0, 0, 0, 0, 0]  # the even column in the low nibble; -0 is 8
    assert quantised.block_scales.float().tolist() == [[448.0]]
    assert float(quantised.global_scale) == pytest.approx(1 / 2688, rel=1e-7)


def test_all_codes_survive_packing() -> None:
    codes = torch.arange(256).remainder(16).to(torch.uint8).view(4, 64)
    assert torch.equal(unpack(pack(codes)), codes)
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    assert codes_of(values).tolist() == list(range(16))


def test_blocks_and_rows_are_independent_given_the_scale() -> None:
    """So shards of a matrix, cut by rows or by whole blocks of columns, have the bytes of the whole."""
    matrix = torch.randn(12, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    amax = amax_of(matrix)
    whole = quantise(matrix, amax)
    parts = [quantise(matrix[6:, 32:64], amax), quantise(matrix[:6, :32], amax)]
    assert torch.equal(parts[0].packed, whole.packed[6:, 16:32]) and torch.equal(parts[1].packed, whole.packed[:6, :16])
    assert torch.equal(parts[0].block_scales.view(torch.uint8), whole.block_scales.view(torch.uint8)[6:, 2:4])


def test_a_shared_scale_serves_the_smaller_part() -> None:
    """Gate and up with amax 1 and 100: both use 100's, and no value is off by more than half a step of its block."""
    gate = torch.rand(8, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    up = gate.flip(0) * 100
    amax = torch.maximum(amax_of(gate), amax_of(up))
    for part in (gate, up):
        blocks = part.unflatten(-1, (-1, 16))
        error = (fake_quantise(part, amax).unflatten(-1, (-1, 16)) - blocks).abs().amax(-1)
        # Half of the widest step, 1/6 of the block's largest, widened by the rounding of the block's scale (1/16).
        assert (error <= blocks.abs().amax(-1) * (1 / 6) * (1 + 1 / 8)).all()
    assert encoding_scale(amax) == 2688 / amax


def test_bytes_are_281_thousandths_of_bf16() -> None:
    matrix = torch.randn(256, 512).to(torch.bfloat16)
    assert quantise(matrix, amax_of(matrix)).num_bytes / (2 * matrix.numel()) == pytest.approx(0.28125, abs=1e-4)


@pytest.mark.parametrize("shape", [(4, 24), (16,), (2, 4, 16)])
def test_a_shape_without_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(QuantisationError, match="multiple of 16"):
        quantise(torch.ones(shape), torch.tensor(1.0))


@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_refused(amax: float) -> None:
    with pytest.raises(QuantisationError, match="not finite"):
        fake_quantise(torch.ones(1, 16), torch.tensor(amax))


def test_vllm_unpacks_the_same_values() -> None:
    """vLLM multiplies scale and global scale first: its rounding may differ by one ulp, its codes and scales not."""
    emulation = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    quantised = quantise(matrix, amax_of(matrix))
    theirs = emulation.dequantize_to_dtype(
        quantised.packed, quantised.block_scales, quantised.global_scale, torch.float32, swizzle=False
    )
    assert torch.allclose(theirs, dequantise(quantised), rtol=2**-23, atol=0)


def test_compressed_tensors_unpacks_the_same_codes() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    quantised = quantise(matrix, amax_of(matrix))
    values = helpers.unpack_fp4_from_uint8(quantised.packed, 32, 64, dtype=torch.float32)
    assert torch.equal(values, torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])[unpack(quantised.packed).int()])
