"""Dequantises NVFP4 weights that arrive tensor by tensor: for servers without FP4 kernels."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_rl.precision.checkpoint import ModelOpt
from megatron_rl.precision.nvfp4 import dequantise

_PARTS = (ModelOpt.packed, ModelOpt.block_scales, ModelOpt.global_scale)


class Unpacker:
    """Puts packed weights together and dequantises them.

    Args:
        names: All names that will arrive; they tell packed weights from plain ones.
        dtype: Dtype of the dequantised weights.
    """

    def __init__(self, names: Iterable[str], dtype: torch.dtype) -> None:
        self._packed = {name.removesuffix(ModelOpt.global_scale) for name in names if name.endswith("." + ModelOpt.global_scale)}
        self._dtype = dtype
        self._arrived: dict[str, dict[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Take the next tensor.

        Returns:
            A plain tensor as it is; a packed weight, dequantised, with the last of its three tensors; None before that.
        """
        module, dot, part = name.rpartition(".")
        if module + dot not in self._packed or part not in _PARTS:
            return name, tensor
        arrived = self._arrived.setdefault(module, {})
        arrived[part] = tensor
        if len(arrived) < len(_PARTS):
            return None
        del self._arrived[module]
        return f"{module}.weight", dequantise(ModelOpt.read(*(arrived[part] for part in _PARTS)), self._dtype)

    @property
    def incomplete(self) -> list[str]:
        """Modules of which only some tensors have arrived."""
        return sorted(self._arrived)
