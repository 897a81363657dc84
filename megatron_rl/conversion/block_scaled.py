"""FP8 weights with a scale for each block, as DeepSeek and Kimi publish them: read as bf16."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.stored import ReadableTensor, StoredTensor
from megatron_rl.wire.tensor_spec import TensorSpec

_SCALE = "_scale_inv"
"""The scale of X.weight is X.weight_scale_inv. In spite of the name, the stored values are multiplied with it."""


@dataclass(frozen=True)
class BlockScaledTensor:
    """A matrix in FP8; value = stored * scale of its block, computed in fp32 and rounded once, to bf16."""

    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]

    @property
    def file(self) -> Path:
        """The file of the FP8 values."""
        return self.weight.file

    @property
    def spec(self) -> TensorSpec:
        """Spec of the dequantised matrix."""
        return TensorSpec(self.weight.spec.name, self.weight.spec.shape, "bfloat16")

    def map(self) -> Tensor:
        """The values; block row by block row, so that no fp32 copy of the full matrix exists."""
        weight, scale = self.weight.map(), self.scale.map().to(torch.float32)
        rows, columns = self.block
        values = torch.empty(self.spec.shape, dtype=torch.bfloat16)
        for number, of_row in enumerate(scale):
            part = slice(number * rows, (number + 1) * rows)
            values[part] = weight[part].to(torch.float32) * of_row.repeat_interleave(columns)[: weight.shape[1]]
        return values


def dequantised(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, Any], dict[str, ReadableTensor]]:
    """Config and tensors of the same model in bf16; what is not block-scaled FP8 stays as it is.

    Raises:
        CheckpointError: A weight lacks its scale, or the scale has a wrong shape, or belongs to no weight.
    """
    quantisation = config.get("quantization_config") or {}
    if quantisation.get("quant_method") != "fp8" or not quantisation.get("weight_block_size"):
        return dict(config), dict(stored)
    block = tuple(quantisation["weight_block_size"])
    problems: list[str] = []
    found: dict[str, ReadableTensor] = {}
    for name, entry in stored.items():
        if entry.spec.dtype != "float8_e4m3fn":
            if not name.endswith(_SCALE):
                found[name] = entry
            continue
        scale = stored.get(name + _SCALE)
        wanted = tuple(-(-size // step) for size, step in zip(entry.spec.shape, block, strict=False))
        if scale is None or scale.spec.shape != wanted:
            there = "is missing" if scale is None else f"is {list(scale.spec.shape)}"
            problems.append(f"{name}{_SCALE} {there}, expected {list(wanted)} for blocks of {list(block)}")
        else:
            found[name] = BlockScaledTensor(entry, scale, block)
    problems += [
        f"{name} belongs to no FP8 weight" for name in stored if name.endswith(_SCALE) and name.removesuffix(_SCALE) not in stored
    ]
    if problems:
        raise CheckpointError("FP8 weights and scales do not match; fetch the checkpoint again:\n  " + "\n  ".join(problems))
    return {key: value for key, value in config.items() if key != "quantization_config"}, found
