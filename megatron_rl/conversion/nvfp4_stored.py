"""NVFP4 weights in ModelOpt's or compressed-tensors' layout: read as the values that they stand for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.stored import StoredTensor, TensorSpec
from megatron_rl.precision import BLOCK, LAYOUTS, CheckpointFormat, dequantise


@dataclass(frozen=True)
class Nvfp4StoredTensor:
    """A matrix [outputs, inputs]; its values are computed in fp32 at each access and rounded once, to `dtype`."""

    packed: StoredTensor
    block_scales: StoredTensor
    global_scale: StoredTensor
    layout: type[CheckpointFormat]
    dtype: torch.dtype

    @property
    def file(self) -> Path:
        return self.packed.file

    @property
    def spec(self) -> TensorSpec:
        outputs, half = self.packed.spec.shape
        return TensorSpec((outputs, 2 * half), self.dtype)

    def map(self) -> Tensor:
        return dequantise(self.layout.read(self.packed.map(), self.block_scales.map(), self.global_scale.map()), self.dtype)


def dequantised_nvfp4(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and tensors of the same model in its own dtype; what is not NVFP4 stays as it is.

    Global scales of activations, which say how a server rounds its inputs and belong to no weight, are left out.
    """
    layout = next((found for found in LAYOUTS.values() if _modules(stored, found)), None)
    if layout is None:
        return dict(config), dict(stored)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    kept, problems = dict(stored), []
    for module in _modules(stored, layout):
        parts = [kept.pop(f"{module}.{part}", None) for part in (layout.packed, layout.block_scales, layout.global_scale)]
        kept.pop(f"{module}.{layout.input_scale}", None)
        problems += (wrong := _wrong(module, parts, layout))
        if not wrong:
            kept[f"{module}.weight"] = Nvfp4StoredTensor(*parts, layout, dtype)
    if problems:
        raise CheckpointError("NVFP4 weights that are not whole:\n  " + "\n  ".join(problems))
    return {key: value for key, value in config.items() if key != "quantization_config"}, kept


def _modules(stored: Mapping[str, StoredTensor], layout: type[CheckpointFormat]) -> list[str]:
    ending = "." + layout.global_scale
    return [name.removesuffix(ending) for name in stored if name.endswith(ending)]


def _wrong(module: str, parts: list[StoredTensor | None], layout: type[CheckpointFormat]) -> list[str]:
    names = [f"{module}.{part}" for part in (layout.packed, layout.block_scales, layout.global_scale)]
    missing = [f"{name} is missing" for name, part in zip(names, parts, strict=True) if part is None]
    if missing:
        return missing
    packed, scales, scale = (part.spec for part in parts if part)
    if packed.dtype is not torch.uint8 or len(packed.shape) != 2:
        return [f"{names[0]} is {packed.dtype} {list(packed.shape)}, expected uint8 [outputs, inputs / 2]"]
    outputs, half = packed.shape
    expected = TensorSpec((outputs, 2 * half // BLOCK), torch.float8_e4m3fn)
    problems = (
        []
        if scales == expected
        else [f"{names[1]} is {scales.dtype} {list(scales.shape)}, expected float8_e4m3fn {list(expected.shape)}"]
    )
    if scale.num_bytes != 4 or scale.dtype is not torch.float32:
        problems.append(f"{names[2]} is {scale.dtype} {list(scale.shape)}, expected one float32")
    return problems
