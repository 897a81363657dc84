"""NVFP4 matrices as checkpoints hold them, for servers that load them from files: the formats of ModelOpt and compressed-tensors.

Both hold the same packed values and block scales. They differ in names, in the global scale (ModelOpt stores the decoding scale,
which values are multiplied with; compressed-tensors the encoding scale, its reciprocal) and in config.json.
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
    """How a checkpoint stores NVFP4 matrices."""

    activation_amax: float | None = None
    """The magnitude from which the global scale of activations is computed, for servers that quantise them, too (W4A4);
    None: weights alone (W4A16)."""

    packed: ClassVar[str]
    block_scales: ClassVar[str] = "weight_scale"
    global_scale: ClassVar[str]
    input_scale: ClassVar[str]
    """Names of a module's tensors, after the module's name and a dot."""
    scale_shape: ClassVar[tuple[int, ...]]
    """Shape of a global scale."""

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """What a weight becomes.

        Args:
            name: Hugging Face name of the weight, MODULE.weight.
            shape: Shape of the weight, [outputs, inputs].
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
        """The tensors that `specs` announces.

        Args:
            name: Hugging Face name of the weight, MODULE.weight.
            matrix: The weight, [outputs, inputs].
            amax: f32 [], of all that share the global scale.
        """
        module, quantised = name.removesuffix(_WEIGHT), quantise(matrix, amax)
        found = {
            module + self.packed: quantised.packed,
            module + self.block_scales: quantised.block_scales,
            module + self.global_scale: self._stored(amax),
        }
        if self.activation_amax is not None:
            found[module + self.input_scale] = self._stored(torch.tensor(self.activation_amax, device=matrix.device))
        return found

    def _stored(self, amax: Tensor) -> Tensor:
        return self.to_stored(encoding_scale(amax)).reshape(self.scale_shape)

    @staticmethod
    @abstractmethod
    def to_stored(encoding: Tensor) -> Tensor:
        """A global scale as the file has it, from the encoding scale S_enc."""

    @staticmethod
    @abstractmethod
    def to_decoding(stored: Tensor) -> Tensor:
        """The decoding scale S_dec, which values are multiplied with, from a global scale of the file."""

    @classmethod
    def read(cls, packed: Tensor, block_scales: Tensor, global_scale: Tensor) -> Nvfp4:
        """The matrix of a module's tensors."""
        return Nvfp4(packed, block_scales, cls.to_decoding(global_scale).reshape(()))

    @abstractmethod
    def config(self, modules: Sequence[str], expert_lists: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json.

        Args:
            modules: Hugging Face names of linear layers that are not quantised.
            expert_lists: Names of lists of experts (model.layers.3.mlp.experts) none of which is quantised.
        """


class ModelOpt(CheckpointFormat):
    """The format of NVIDIA's ModelOpt."""

    packed, global_scale, input_scale = _WEIGHT, "weight_scale_2", "input_scale"
    scale_shape = ()

    @staticmethod
    def to_stored(encoding: Tensor) -> Tensor:
        """ModelOpt stores S_dec = 1 / S_enc."""
        return torch.div(torch.ones_like(encoding), encoding)

    @staticmethod
    def to_decoding(stored: Tensor) -> Tensor:
        """The stored scale itself."""
        return stored

    def config(self, modules: Sequence[str], expert_lists: Sequence[str]) -> dict[str, Any]:
        """See CheckpointFormat."""
        values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
        group: dict[str, Any] = {"targets": ["Linear"], "weights": values}
        if self.activation_amax is not None:
            group["input_activations"] = values
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4" if self.activation_amax is None else "NVFP4",
            "group_size": BLOCK,
            "config_groups": {"group_0": group},
            "ignore": [*modules, *(f"{name}*" for name in expert_lists)],
        }


class CompressedTensors(CheckpointFormat):
    """The format nvfp4-pack-quantized of compressed-tensors, as llm-compressor writes it."""

    packed, global_scale, input_scale = "weight_packed", "weight_global_scale", "input_global_scale"
    scale_shape = (1,)

    @staticmethod
    def to_stored(encoding: Tensor) -> Tensor:
        """compressed-tensors stores S_enc."""
        return encoding

    @staticmethod
    def to_decoding(stored: Tensor) -> Tensor:
        """S_dec = 1 / S_enc."""
        return torch.div(torch.ones_like(stored), stored)

    def config(self, modules: Sequence[str], expert_lists: Sequence[str]) -> dict[str, Any]:
        """See CheckpointFormat."""
        values = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": BLOCK}
        values["scale_dtype"] = "torch.float8_e4m3fn"
        inputs = None if self.activation_amax is None else {**values, "dynamic": "local"}
        group = {
            "targets": ["Linear"],
            "format": "nvfp4-pack-quantized",
            "weights": {**values, "dynamic": False},
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [*modules, *(f"re:{re.escape(name)}[.].*" for name in expert_lists)],
        }


FORMATS: dict[str, type[CheckpointFormat]] = {"modelopt": ModelOpt, "compressed-tensors": CompressedTensors}
"""The formats by their names on the command line."""


def format_named(name: str) -> type[CheckpointFormat]:
    """The format of this name.

    Raises:
        QuantisationError: FORMATS has no such name.
    """
    if name not in FORMATS:
        raise QuantisationError(f"{name!r} is not a format of NVFP4 checkpoints; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def stored_format(precision: Precision, name: str = "modelopt") -> CheckpointFormat:
    """The format for servers of what a run with this configuration trains, with the scale of activations if they quantise those.

    Args:
        precision: The run's section [precision].
        name: A key of FORMATS.

    Raises:
        QuantisationError: FORMATS has no such name.
    """
    return format_named(name)(precision.activation_amax if precision.activations == "nvfp4" else None)
