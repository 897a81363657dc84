"""NVFP4 weights in the format of ModelOpt or compressed-tensors, read as the values that they stand for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.stored import ReadableTensor, StoredTensor
from megatron_rl.precision import BLOCK, FORMATS, CheckpointFormat, dequantise
from megatron_rl.wire.tensor_spec import TensorSpec, dtype_name


@dataclass(frozen=True)
class Nvfp4StoredTensor:
    """A matrix [outputs, inputs]; its values are computed in fp32 at each access and rounded once, to `dtype`."""

    name: str
    packed: StoredTensor
    block_scales: StoredTensor
    global_scale: StoredTensor
    format: type[CheckpointFormat]
    dtype: torch.dtype

    @property
    def file(self) -> Path:
        """The file of the packed values."""
        return self.packed.file

    @property
    def spec(self) -> TensorSpec:
        """Spec of the dequantised matrix."""
        outputs, half = self.packed.spec.shape
        return TensorSpec(self.name, (outputs, 2 * half), dtype_name(self.dtype))

    def map(self) -> Tensor:
        """The dequantised values."""
        return dequantise(self.format.read(self.packed.map(), self.block_scales.map(), self.global_scale.map()), self.dtype)


def dequantised_nvfp4(
    config: Mapping[str, Any], stored: Mapping[str, ReadableTensor]
) -> tuple[dict[str, Any], dict[str, ReadableTensor]]:
    """Config and tensors of the same model in its own dtype; what is not NVFP4 stays as it is.

    Global scales of activations, by which a server quantises its inputs, belong to no weight and are left out.

    Raises:
        CheckpointError: A quantised weight lacks a tensor, or one has a wrong shape or dtype.
    """
    plain = {name: entry for name, entry in stored.items() if isinstance(entry, StoredTensor)}
    stored_as = next((found for found in FORMATS.values() if _modules(plain, found)), None)
    if stored_as is None:
        return dict(config), dict(stored)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    kept, problems = dict(stored), []
    for module in _modules(plain, stored_as):
        parts = {f"{module}.{part}": plain.get(f"{module}.{part}") for part in _parts(stored_as)}
        for name in (*parts, f"{module}.{stored_as.input_scale}"):
            kept.pop(name, None)
        wrong = [f"{name} is missing" for name, part in parts.items() if part is None]
        if not wrong:
            packed, block_scales, global_scale = (part for part in parts.values() if part is not None)
            wrong = _wrong(packed.spec, block_scales.spec, global_scale.spec)
            name = f"{module}.weight"
            kept[name] = Nvfp4StoredTensor(name, packed, block_scales, global_scale, stored_as, dtype)
        problems += wrong
    if problems:
        raise CheckpointError("incomplete or wrong NVFP4 weights; fetch the checkpoint again:\n  " + "\n  ".join(problems))
    return {key: value for key, value in config.items() if key != "quantization_config"}, kept


def _parts(stored_as: type[CheckpointFormat]) -> tuple[str, str, str]:
    return stored_as.packed, stored_as.block_scales, stored_as.global_scale


def _modules(stored: Mapping[str, StoredTensor], stored_as: type[CheckpointFormat]) -> list[str]:
    ending = "." + stored_as.global_scale
    return [name.removesuffix(ending) for name in stored if name.endswith(ending)]


def _wrong(packed: TensorSpec, block_scales: TensorSpec, global_scale: TensorSpec) -> list[str]:
    if packed.dtype != "uint8" or len(packed.shape) != 2:
        return [f"{packed.name} is {packed.dtype} {list(packed.shape)}, expected uint8 [outputs, inputs / 2]"]
    outputs, half = packed.shape
    expected = TensorSpec(block_scales.name, (outputs, 2 * half // BLOCK), "float8_e4m3fn")
    problems = []
    if block_scales != expected:
        problems.append(
            f"{block_scales.name} is {block_scales.dtype} {list(block_scales.shape)}, "
            f"expected {expected.dtype} {list(expected.shape)}"
        )
    if global_scale.num_bytes != 4 or global_scale.dtype != "float32":
        problems.append(f"{global_scale.name} is {global_scale.dtype} {list(global_scale.shape)}, expected one float32")
    return problems
