"""Matrices on which NVFP4 quantisers are compared. They are made of a stream of bits that no version of numpy changes."""

import numpy as np
import torch
from torch import Tensor

ROWS, INPUTS = 16, 48


def _words(seed: int, number: int) -> np.ndarray:
    return np.random.PCG64(seed).random_raw(number)


def _uniform(seed: int, rows: int = ROWS, inputs: int = INPUTS) -> Tensor:
    """f32 [rows, inputs], in (-1, 1)."""
    words = _words(seed, rows * inputs)
    magnitudes = (words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    signs = np.where(words & np.uint64(1), np.float32(-1), np.float32(1))
    return torch.from_numpy((magnitudes * signs).reshape(rows, inputs))


def _normal(seed: int, rows: int = ROWS, inputs: int = INPUTS) -> Tensor:
    """f32 [rows, inputs], near to the normal distribution: a sum of four uniform numbers."""
    return torch.stack([_uniform(seed + 1000 * n, rows, inputs) for n in range(4)]).sum(0)


def matrices() -> dict[str, Tensor]:
    """Matrices that share their global scale with nothing, [rows, inputs] in bf16 or fp32."""
    normal = _normal(1) * 0.02
    powers = torch.from_numpy((_words(2, ROWS * INPUTS) % np.uint64(40)).astype(np.float32).reshape(ROWS, INPUTS))
    wide = _normal(3) * 2.0**-powers
    blocks = _normal(4).unflatten(-1, (-1, 16)) * 2.0 ** -torch.arange(48.0).reshape(16, 3, 1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2)
    on_ties = (ties * torch.where(_uniform(5, 16, 16) > 0, 1.0, -1.0)).repeat(1, 3) * 2.0 ** -torch.arange(16.0)[:, None]
    zeros = _normal(6).to(torch.bfloat16)
    zeros[3], zeros[:, 16:32], zeros[5, ::2] = 0.0, 0.0, 0.0
    return {
        "normal": normal.to(torch.bfloat16),
        "normal, fp32": normal,
        "one row": _normal(7, 1, 64).to(torch.bfloat16),
        "tall": _normal(8, 96, 16).to(torch.bfloat16),
        "many magnitudes": wide.to(torch.bfloat16),
        "many magnitudes, fp32": wide,
        "scales from largest to underflow": blocks.flatten(-2).to(torch.bfloat16),
        "on ties": on_ties.to(torch.bfloat16),
        "one outlier": torch.where(torch.arange(ROWS * INPUTS).reshape(ROWS, INPUTS) == 100, 3e4, normal).to(torch.bfloat16),
        "near the largest fp32": normal / normal.abs().max() * 3e38,
        "subnormal fp32": _uniform(9) * 2.0**-130,
        "smallest amax": _uniform(10) * 1e-37,
        "zeros": zeros,
        "nothing but zeros": torch.zeros(ROWS, INPUTS, dtype=torch.bfloat16),
    }


def fused() -> dict[str, tuple[Tensor, ...]]:
    """What a server fuses along its rows, and quantises with one global scale."""
    return {
        "gate and up": (_normal(20).to(torch.bfloat16), (_normal(21) * 0.1).to(torch.bfloat16)),
        "q, k and v": tuple((_normal(22 + n, rows) * 0.3**n).to(torch.bfloat16) for n, rows in enumerate((32, 8, 8))),
    }
