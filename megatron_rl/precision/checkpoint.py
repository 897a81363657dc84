"""NVFP4 matrices as checkpoints hold them, for servers that load them from files: ModelOpt's format, and that of compressed-tensors.

Both hold the same packed values and block scales. They differ in names, in the global scale (ModelOpt keeps what values are multiplied with,
compressed-tensors what they were multiplied with) and in what config.json says.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_rl.config.sections import Precision
from megatron_rl.precision.nvfp4 import BLOCK, Nvfp4, QuantisationError, encoding_scale, quantise
from megatron_rl.wire.tensor_spec import TensorSpec

_WEIGHT = "weight"


@dataclass(frozen=True)
class CheckpointFormat(ABC):
    """activation_amax: the magnitude that the global scale of activations comes from, for servers that quantise them, too (W4A4); None:
    weights alone (W4A16)."""

    activation_amax: float | None = None

    packed: ClassVar[str]
    block_scales: ClassVar[str] = "weight_scale"
    global_scale: ClassVar[str]
    input_scale: ClassVar[str]
    """Names of a module's tensors, behind its own and a dot."""
    scale_shape: ClassVar[tuple[int, ...]]

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """What a weight becomes.

        Args:
            name: Hugging Face name of the weight, MODULE.weight.
            shape: Of the weight, [outputs, inputs].
        """
        module, (outputs, inputs) = name.removesuffix(_WEIGHT), shape
        specs = [
            TensorSpec(module + self.packed, (outputs, inputs // 2), "uint8"),
            TensorSpec(module + self.block_scales, (outputs, inputs // BLOCK), "float8_e4m3fn"),
            TensorSpec(module + self.global_scale, self.scale_shape, "float32"),
        ]
        if self.activation_amax is not None:
            specs.append(TensorSpec(module + self.input_scale, self.scale_shape, "float32"))
        return specs

    def tensors(self, name: str, matrix: Tensor, amax: Tensor) -> dict[str, Tensor]:
        """The tensors that `specs` announces. amax: f32 [], of all that shares the global scale."""
        module, quantised = name.removesuffix(_WEIGHT), quantise(matrix, amax)
        found = {
            module + self.packed: quantised.packed, module + self.block_scales: quantised.block_scales,
            module + self.global_scale: self._stored(amax),
        }  # fmt: skip
        if self.activation_amax is not None:
            found[module + self.input_scale] = self._stored(torch.tensor(self.activation_amax, device=matrix.device))
        return found

    def _stored(self, amax: Tensor) -> Tensor:
        return self.to_stored(encoding_scale(amax)).reshape(self.scale_shape)

    @staticmethod
    @abstractmethod
    def to_stored(encoding: Tensor) -> Tensor:
        """A global scale as the file has it, from S_enc."""

    @staticmethod
    @abstractmethod
    def to_decoding(stored: Tensor) -> Tensor:
        """S_dec, which values are multiplied with, from a global scale of the file."""

    @classmethod
    def read(cls, packed: Tensor, block_scales: Tensor, global_scale: Tensor) -> Nvfp4:
        """The matrix that a module's tensors stand for."""
        return Nvfp4(packed, block_scales, cls.to_decoding(global_scale).reshape(()))

    @abstractmethod
    def config(self, modules: Sequence[str], expert_lists: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. modules: linear maps that stay as they are, by Hugging Face names; expert_lists: the names
        (model.layers.3.mlp.experts) under which all do."""


class ModelOpt(CheckpointFormat):
    """As NVIDIA's ModelOpt exports it."""

    packed, global_scale, input_scale = _WEIGHT, "weight_scale_2", "input_scale"
    scale_shape = ()

    @staticmethod
    def to_stored(encoding: Tensor) -> Tensor:
        return torch.div(torch.ones_like(encoding), encoding)

    @staticmethod
    def to_decoding(stored: Tensor) -> Tensor:
        return stored

    def config(self, modules: Sequence[str], expert_lists: Sequence[str]) -> dict[str, Any]:
        values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
        group: dict[str, Any] = {"targets": ["Linear"], "weights": values}
        if self.activation_amax is not None:
            group["input_activations"] = values
        return {
            "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4" if self.activation_amax is None else "NVFP4", "group_size": BLOCK,
            "config_groups": {"group_0": group}, "ignore": [*modules, *(f"{name}*" for name in expert_lists)],
        }  # fmt: skip


class CompressedTensors(CheckpointFormat):
    """As llm-compressor writes it, in its format nvfp4-pack-quantized."""

    packed, global_scale, input_scale = "weight_packed", "weight_global_scale", "input_global_scale"
    scale_shape = (1,)

    @staticmethod
    def to_stored(encoding: Tensor) -> Tensor:
        return encoding

    @staticmethod
    def to_decoding(stored: Tensor) -> Tensor:
        return torch.div(torch.ones_like(stored), stored)

    def config(self, modules: Sequence[str], expert_lists: Sequence[str]) -> dict[str, Any]:
        values = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": BLOCK}
        values["scale_dtype"] = "torch.float8_e4m3fn"
        inputs = None if self.activation_amax is None else {**values, "dynamic": "local"}
        group = {
            "targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": {**values, "dynamic": False}, "input_activations": inputs,
            "output_activations": None,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": [*modules, *(f"re:{re.escape(name)}[.].*" for name in expert_lists)],
        }  # fmt: skip


FORMATS: dict[str, type[CheckpointFormat]] = {"modelopt": ModelOpt, "compressed-tensors": CompressedTensors}
"""By the words of the command line."""


def format_named(name: str) -> type[CheckpointFormat]:
    if name not in FORMATS:
        raise QuantisationError(f"{name!r} is not a format of NVFP4 checkpoints; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def stored_format(precision: Precision, name: str = "modelopt") -> CheckpointFormat:
    """In which servers find what a run with this configuration trains: whether they quantise activations, too, and by which scale."""
    return format_named(name)(precision.activation_amax if precision.activations == "nvfp4" else None)
