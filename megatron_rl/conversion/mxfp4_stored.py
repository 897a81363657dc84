"""Experts in MXFP4, as GPT-OSS is published: blocks of 32 numbers of four bits that share an exponent, read as bf16.

The format is that of transformers' `integrations.mxfp4`: of a layer's experts, X_blocks is uint8 [experts, outputs,
inputs / 32, 16], two numbers a byte, the lower four bits first; X_scales is uint8 [experts, outputs, inputs / 32], the exponent
plus 127. They stand for X, [experts, inputs, outputs].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.stored import ReadableTensor, StoredTensor
from megatron_rl.wire.tensor_spec import TensorSpec

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
"""The value of each code; the highest of its four bits is the sign."""


@dataclass(frozen=True)
class Mxfp4Experts:
    """A layer's experts as they are read: like a tensor [experts, inputs, outputs] of which entries are taken one by one.

    A layer of GPT-OSS 120B has four gigabytes in bf16, and a rank has a few of its experts.
    """

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the dequantised tensor."""
        experts, outputs, groups, _ = self.blocks.shape
        return torch.Size((experts, groups * _BLOCK, outputs))

    @property
    def dtype(self) -> torch.dtype:
        """Of the dequantised values, which are exact in it."""
        return torch.bfloat16

    def __getitem__(self, expert: int) -> Tensor:
        """The values of one expert, [inputs, outputs]."""
        packed, exponents = self.blocks[expert], self.scales[expert].to(torch.int32) - _EXPONENT_BIAS
        values = _VALUES[torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2).long()]
        return torch.ldexp(values, exponents[..., None]).to(torch.bfloat16).flatten(-2).t().contiguous()


@dataclass(frozen=True)
class Mxfp4StoredTensor:
    """All experts' weights of one layer's fc1 or fc2."""

    name: str
    blocks: StoredTensor
    scales: StoredTensor

    @property
    def file(self) -> Path:
        """The file of the blocks."""
        return self.blocks.file

    @property
    def spec(self) -> TensorSpec:
        """Spec of the dequantised tensor."""
        experts, outputs, groups, _ = self.blocks.spec.shape
        return TensorSpec(self.name, (experts, groups * _BLOCK, outputs), "bfloat16")

    def map(self) -> Tensor:
        """The experts, each dequantised when it is taken."""
        return cast(Tensor, Mxfp4Experts(self.blocks.map(), self.scales.map()))


def dequantised_mxfp4(
    config: Mapping[str, Any], stored: Mapping[str, ReadableTensor]
) -> tuple[dict[str, Any], dict[str, ReadableTensor]]:
    """Config and tensors of the same model in bf16; what is not MXFP4 stays as it is.

    Raises:
        CheckpointError: Blocks or scales are missing, or have a wrong shape or dtype.
    """
    if (config.get("quantization_config") or {}).get("quant_method") != "mxfp4":
        return dict(config), dict(stored)
    kept, problems = dict(stored), []
    for name in sorted({n.removesuffix(end) for n in stored for end in (_BLOCKS, _SCALES) if n.endswith(end)}):
        blocks, scales = (stored.get(name + end) for end in (_BLOCKS, _SCALES))
        if not isinstance(blocks, StoredTensor) or not isinstance(scales, StoredTensor):
            problems.append(f"{name}{_SCALES if blocks else _BLOCKS} is missing")
            continue
        of_blocks, of_scales = blocks.spec, scales.spec
        if of_blocks.dtype != "uint8" or len(of_blocks.shape) != 4 or of_blocks.shape[-1] != _BLOCK // 2:
            problems.append(
                f"{of_blocks.name} is {of_blocks.dtype} {list(of_blocks.shape)}, expected uint8 [experts, outputs, inputs / 32, "
                "16]"
            )
        elif of_scales.dtype != "uint8" or of_scales.shape != of_blocks.shape[:-1]:
            problems.append(
                f"{of_scales.name} is {of_scales.dtype} {list(of_scales.shape)}, expected uint8 {list(of_blocks.shape[:-1])}"
            )
        else:
            del kept[name + _BLOCKS], kept[name + _SCALES]
            kept[name] = Mxfp4StoredTensor(name, blocks, scales)
    if problems:
        raise CheckpointError("incomplete or wrong MXFP4 weights; fetch the checkpoint again:\n  " + "\n  ".join(problems))
    return {key: value for key, value in config.items() if key != "quantization_config"}, kept
