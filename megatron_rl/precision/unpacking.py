"""Packed weights that arrive tensor by tensor, back to plain ones: for servers without FP4 kernels."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_rl.precision.checkpoint import ModelOpt
from megatron_rl.precision.nvfp4 import dequantise

_PARTS = (ModelOpt.packed, ModelOpt.block_scales, ModelOpt.global_scale)


class Unpacker:
    """names: of all that will arrive, which tell packed weights from plain ones. dtype: of the unpacked weights."""

    def __init__(self, names: Iterable[str], dtype: torch.dtype) -> None:
        self._packed = {name.removesuffix(ModelOpt.global_scale) for name in names if name.endswith("." + ModelOpt.global_scale)}
        self._dtype = dtype
        self._arrived: dict[str, dict[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """A plain tensor as it is; a packed weight when the last of its three tensors is there, None before."""
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
        """Modules of which only a part has arrived."""
        return sorted(self._arrived)
