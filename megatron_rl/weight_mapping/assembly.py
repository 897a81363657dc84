"""Hugging Face tensors from parameters that arrive one after the other."""

import torch
from torch import Tensor

from megatron_rl.weight_mapping.parameter import HfSlot, Parameter


def names_completed_by(parameter: Parameter) -> list[str]:
    """Names of the tensors that are complete once this parameter and those before it in the table's order have arrived."""
    return [slot.name for slot in parameter.hf if slot.index is None or slot.index == slot.shape[0] - 1]


class Assembly:
    """Assembles Hugging Face tensors from parameters in the table's order.

    A tensor of one parameter is passed on as it is. A tensor of all experts is kept until the last expert has arrived, so at most
    a few are in memory at a time.
    """

    def __init__(self) -> None:
        self._incomplete: dict[str, Tensor] = {}

    def add(self, parameter: Parameter, full: Tensor) -> list[tuple[str, Tensor]]:
        """Take the next parameter.

        Args:
            parameter: The next one of the table.
            full: Megatron's full tensor, all shards together.

        Returns:
            Names and tensors that are complete now: those that `names_completed_by` names.
        """
        parts = dict(parameter.to_hf(full))
        for slot in parameter.hf:
            if slot.index is not None:
                self._place(slot, parts[slot.name])
        return [(name, self._incomplete.pop(name, parts[name])) for name in names_completed_by(parameter)]

    def _place(self, slot: HfSlot, part: Tensor) -> None:
        if slot.name not in self._incomplete:
            self._incomplete[slot.name] = torch.empty(slot.shape, dtype=part.dtype, device=part.device)
        self._incomplete[slot.name][slot.index] = part
