"""NVFP4 numerics: E2M1 values in blocks of 16 along the input dimension, one E4M3 scale a block, one fp32 scale a matrix.

The order of operations is Transformer Engine's, in fp32, and every division is a true one: weights in bf16 are often on ties,
where another order of the same formula gives other bytes. Trainer, exporter, weight sync and server plugin all use these
functions.

    S_enc = min(2688 / amax, FLT_MAX)                      2688 = 448 * 6; 1 for amax = 0; S_dec = 1 / S_enc
    s     = e4m3(max |x| of the block * (S_enc * (1 / 6)))
    code  = e2m1(clamp(x * min(1 / (s * S_dec), FLT_MAX), -6, 6))     to the nearest, ties to the even code
    value = e2m1 * s * S_dec
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import UserError

BLOCK = 16
"""Neighbouring inputs of one row that share a scale."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 values of the codes 0 to 7; bit 3 of a code is the sign."""

_E4M3_MAX, _E2M1_MAX = 448.0, MAGNITUDES[-1]
_FLT_MAX = torch.finfo(torch.float32).max
_EXPONENT_BITS, _MAGNITUDE_BITS = 0x7F800000, 0x7FFFFFFF  # of an IEEE single
_CHUNK_ELEMENTS = 1 << 18  # fp32 temporaries of 1 MiB stay in a core's cache
_GPU_CHUNK_ELEMENTS = 1 << 27


class QuantisationError(UserError, ValueError):
    """Weights that cannot be quantised as configured; the message names shape or value and the rule."""


@dataclass(frozen=True)
class Nvfp4:
    """A matrix [outputs, inputs] in NVFP4."""

    packed: Tensor
    """u8 [outputs, inputs / 2]: two codes a byte, that of the even column in the low nibble."""
    block_scales: Tensor
    """float8_e4m3fn [outputs, inputs / 16]."""
    global_scale: Tensor
    """f32 []: S_dec, which values are multiplied with last (ModelOpt's weight_scale_2)."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of packed values and scales."""
        return sum(part.numel() * part.element_size() for part in (self.packed, self.block_scales, self.global_scale))


def amax_of(matrix: Tensor) -> Tensor:
    """max |x|, f32 []; NaN if any value is."""
    low, high = torch.aminmax(matrix.detach())
    return torch.maximum(-low, high).to(torch.float32)


def encoding_scale(amax: Tensor) -> Tensor:
    """S_enc, f32 (compressed-tensors' weight_global_scale).

    Args:
        amax: f32, largest magnitude of all that share the global scale.
    """
    scale = torch.div(torch.full_like(amax, _E4M3_MAX * _E2M1_MAX), amax).clamp(max=_FLT_MAX)
    return torch.where(amax == 0, torch.ones_like(amax), scale)


def quantise(matrix: Tensor, amax: Tensor) -> Nvfp4:
    """Quantise a matrix; some of its rows, or complete blocks of its columns, give the same rows or blocks of the result.

    Args:
        matrix: [outputs, inputs], of any floating dtype.
        amax: f32 [], of everything that shares the global scale with this matrix, at least its own.

    Raises:
        QuantisationError: amax is not finite, or inputs are not a multiple of 16.
    """
    _check(matrix, amax)
    packed = matrix.new_empty((matrix.shape[0], matrix.shape[1] // 2), dtype=torch.uint8)
    scales = matrix.new_empty((matrix.shape[0], matrix.shape[1] // BLOCK), dtype=torch.float8_e4m3fn)
    encoding = encoding_scale(amax)
    for rows in _row_chunks(matrix):
        rounded, scales[rows] = _rounded(matrix[rows], encoding)
        packed[rows] = pack(codes_of(rounded))
    return Nvfp4(packed, scales, _reciprocal(encoding))


def dequantise(quantised: Nvfp4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [outputs, inputs], computed in fp32 and rounded once, to `dtype`."""
    rows, inputs = quantised.packed.shape[0], 2 * quantised.packed.shape[1]
    values = torch.empty((rows, inputs), dtype=dtype, device=quantised.packed.device)
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=values.device)
    for chunk in _row_chunks(values):
        codes = unpack(quantised.packed[chunk])
        values[chunk] = _scaled(table[codes.int()], quantised.block_scales[chunk], quantised.global_scale)
    return values


def fake_quantise(matrix: Tensor, amax: Tensor) -> Tensor:
    """`dequantise(quantise(matrix, amax), matrix.dtype)` to the last bit, without the codes in between."""
    _check(matrix, amax)
    encoding, values = encoding_scale(amax), torch.empty_like(matrix)
    decoding = _reciprocal(encoding)
    for rows in _row_chunks(matrix):
        rounded, scales = _rounded(matrix[rows], encoding)
        values[rows] = _scaled(rounded, scales, decoding)
    return values


def codes_of(values: Tensor) -> Tensor:
    """u8 codes of E2M1 values, fp32; -0 has code 8."""
    bits = values.view(torch.int32)
    # For magnitudes of 1 or more, a code is the exponent and the first bit of the fraction of fp32, with another bias; below is
    # only 0.5.
    magnitudes = torch.maximum(((bits & _MAGNITUDE_BITS) >> 22) - 252, (values != 0).to(torch.int32))
    return (magnitudes | ((bits >> 28) & 8)).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """u8 [..., n] to u8 [..., n / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """u8 [..., n / 2] to u8 [..., n]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _rounded(matrix: Tensor, encoding: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 values in fp32 [rows, inputs] and the block scales, e4m3 [rows, inputs / 16]."""
    blocks = matrix.to(torch.float32).unflatten(-1, (-1, BLOCK))
    sixth = torch.tensor(1.0 / _E2M1_MAX, dtype=torch.float32, device=matrix.device)
    # torch's conversion does not saturate: what rounding lifts above 448 would become NaN.
    scales = (blocks.abs().amax(dim=-1) * (encoding * sixth)).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    factor = _reciprocal(scales.to(torch.float32) * _reciprocal(encoding)).clamp(max=_FLT_MAX)
    return _to_e2m1(blocks * factor.unsqueeze(-1)).flatten(-2), scales


def _to_e2m1(values: Tensor) -> Tensor:
    """The nearest E2M1 value, ties to the even code; larger ones become 6. Overwrites its argument."""
    values.clamp_(-_E2M1_MAX, _E2M1_MAX)
    # The power of two below each magnitude, at least 1: half of it is the distance of E2M1 values there, and multiples of that
    # distance are even exactly where the codes are.
    distance = (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_(min=1.0).mul_(0.5)
    return values.div_(distance).round_().mul_(distance)


def _scaled(rounded: Tensor, block_scales: Tensor, decoding: Tensor) -> Tensor:
    """[rows, inputs], fp32. The first product is exact, so that only the second one rounds."""
    blocks = rounded.unflatten(-1, (-1, BLOCK))
    return (blocks * block_scales.to(torch.float32).unsqueeze(-1)).mul_(decoding).flatten(-2)


def _reciprocal(values: Tensor) -> Tensor:
    return torch.div(torch.ones_like(values), values)


def _row_chunks(matrix: Tensor) -> list[slice]:
    elements = _GPU_CHUNK_ELEMENTS if matrix.is_cuda else _CHUNK_ELEMENTS
    step = max(1, elements // max(1, matrix.shape[1]))
    return [slice(first, first + step) for first in range(0, matrix.shape[0], step)]


def _check(matrix: Tensor, amax: Tensor) -> None:
    if matrix.dim() != 2 or matrix.shape[1] % BLOCK:
        raise QuantisationError(
            f"shape {list(matrix.shape)}: NVFP4 needs matrices whose columns (inputs) are a multiple of {BLOCK}"
        )
    if not bool(torch.isfinite(amax)):
        raise QuantisationError(f"amax = {float(amax)}: NVFP4 has no scale for values that are not finite")
