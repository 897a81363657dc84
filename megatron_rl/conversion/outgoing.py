"""The tensors that an export of a Megatron checkpoint writes: unchanged, or with matrices in NVFP4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.conversion.carried import CompletedCheckpoint
from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.precision import CheckpointFormat, Selection, amax_of
from megatron_rl.weight_mapping import ParameterTable, Role
from megatron_rl.wire.tensor_spec import TensorSpec


class Outgoing(Protocol):
    """The tensors of an exported folder."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Specs of all tensors of the folder, by name."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """What config.json has in addition to the model's own."""
        ...

    def source_of(self, name: str) -> str:
        """The checkpoint's tensor that a tensor of the folder is made from."""
        ...

    def read(self, source: str) -> Mapping[str, Tensor]:
        """All tensors that are made from one of the checkpoint's, in memory."""
        ...


class Plain:
    """All tensors as the checkpoint has them."""

    def __init__(self, checkpoint: CompletedCheckpoint) -> None:
        self._checkpoint, self.specs = checkpoint, checkpoint.specs
        self.config: Mapping[str, Any] = {}

    def source_of(self, name: str) -> str:
        """The tensor itself."""
        return name

    def read(self, source: str) -> Mapping[str, Tensor]:
        """A copy in memory."""
        return {source: self._checkpoint[source].clone(memory_format=torch.contiguous_format)}


@dataclass(frozen=True)
class QuantisedAs:
    """What an exported checkpoint quantises, and in which format it stores it."""

    stored_as: CheckpointFormat
    modules: Sequence[str] = ("attention", "mlp", "experts")
    """The modules to quantise, as in [precision] modules."""
    exclude: Sequence[str] = ()
    """The modules to leave out, as in [precision] exclude."""


class Quantised:
    """Matrices in NVFP4, as a trainer with the same [precision] multiplies with them, to the last bit.

    A global scale depends on all matrices that share it: the members of a group are read once for it and once more to be
    quantised, so that memory stays that of a few tensors. MTP layers are not quantised.
    """

    def __init__(self, checkpoint: CompletedCheckpoint, wanted: QuantisedAs) -> None:
        self._checkpoint, self._stored_as = checkpoint, wanted.stored_as
        selection = Selection(ParameterTable(checkpoint.config), wanted.modules, wanted.exclude)
        self._group_of = selection.group_of
        self._members: dict[str, list[str]] = {group: [] for group in selection.groups}
        for name, group in selection.group_of.items():
            self._members[group].append(name)
        self._amaxes: dict[str, Tensor] = {}
        self._sources: dict[str, str] = {}
        self.specs: dict[str, TensorSpec] = {}
        for source, spec in checkpoint.specs.items():
            made = wanted.stored_as.specs(source, spec.shape) if source in self._group_of else [spec]
            self.specs |= {part.name: part for part in made}
            self._sources |= {part.name: source for part in made}
        table = ParameterTable(checkpoint.config, with_mtp=checkpoint.with_mtp)
        self.config = {"quantization_config": wanted.stored_as.config(*left_out(table, selection))}

    def source_of(self, name: str) -> str:
        """The matrix of a packed tensor or a scale; any other tensor itself."""
        return self._sources[name]

    def read(self, source: str) -> Mapping[str, Tensor]:
        """Packed values and scales of a matrix; any other tensor as it is."""
        if source not in self._group_of:
            return {source: self._checkpoint[source].clone(memory_format=torch.contiguous_format)}
        return self._stored_as.tensors(source, self._checkpoint[source], self._amax(self._group_of[source]))

    def _amax(self, group: str) -> Tensor:
        if group not in self._amaxes:
            found = torch.stack([amax_of(self._checkpoint[name]) for name in self._members[group]]).amax()
            if not torch.isfinite(found):
                raise CheckpointError(f"{', '.join(self._members[group])}: values that are not finite have no NVFP4 form")
            self._amaxes[group] = found
        return self._amaxes[group]


def left_out(table: ParameterTable, selection: Selection) -> tuple[list[str], list[str]]:
    """What is not quantised, for the `ignore` list of config.json.

    vLLM also matches an entry of ModelOpt's list as a part of a name ("model.layers.1" is in "model.layers.10"): only complete
    names of modules are safe.

    Returns:
        Hugging Face names of linear layers, and names of lists of experts none of which is quantised.
    """
    copies = [name for name in table.mtp_copies if "head" in name]
    modules = dict.fromkeys(name.removesuffix(".weight") for name in ("lm_head.weight", *copies))
    experts: dict[str, None] = {}
    for parameter in table.parameters:
        if not (parameter.role.has_matrices or parameter.role in (Role.ROUTER, Role.OUTPUT)):
            continue
        for tensor in parameter.hf:
            module = tensor.name.removesuffix(".weight")
            if tensor.name in selection.group_of:
                continue
            if not parameter.is_expert:
                modules[module] = None
            elif tensor.index is None:
                experts[module.rpartition(f".{parameter.expert}.")[0]] = None
            else:  # all experts are one tensor
                experts[module.rpartition(".")[0]] = None
    return list(modules), list(experts)
