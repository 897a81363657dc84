"""Whole Hugging Face tensors from parameters that arrive one after the other."""

import torch
from torch import Tensor

from megatron_rl.weight_mapping.parameter import HfTensor, Parameter


def names_completed_by(parameter: Parameter) -> list[str]:
    """Names that are whole once this parameter has arrived, the others before it in the order of the table."""
    return [tensor.name for tensor in parameter.hf if tensor.index is None or tensor.index == tensor.shape[0] - 1]


class Assembly:
    """Parameters come in the table's order. A tensor that belongs to one parameter is passed on as it is, and a tensor of all
    experts is kept until the last of them: at most a few are under way at a time."""

    def __init__(self) -> None:
        self._whole: dict[str, Tensor] = {}

    def add(self, parameter: Parameter, full: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that are whole now: those that `names_completed_by` names."""
        parts = dict(parameter.to_hf(full))
        for tensor in parameter.hf:
            if tensor.index is not None:
                self._place(tensor, parts[tensor.name])
        return [(name, self._whole.pop(name, parts[name])) for name in names_completed_by(parameter)]

    def _place(self, tensor: HfTensor, part: Tensor) -> None:
        if tensor.name not in self._whole:
            self._whole[tensor.name] = torch.empty(tensor.shape, dtype=part.dtype, device=part.device)
        self._whole[tensor.name][tensor.index] = part
