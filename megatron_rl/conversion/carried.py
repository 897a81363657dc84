"""Multi-token prediction (MTP) layers that a run did not train, copied from its initial model into what it writes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from megatron_rl.conversion.megatron_checkpoint import MegatronCheckpoint
from megatron_rl.conversion.opening import open_checkpoint
from megatron_rl.weight_mapping import ParameterTable
from megatron_rl.wire.tensor_spec import TensorSpec


@dataclass(frozen=True)
class CarriedLayers:
    """The MTP layers of a run's initial model. Empty where it has none, and where the policy has them itself."""

    source: Mapping[str, Tensor]
    """The run's initial model."""
    specs: dict[str, TensorSpec]
    """Specs of all tensors that are copied from the initial model or repeat one of the policy."""
    copies: dict[str, str]
    """Tensors that repeat one of the policy (embedding, output layer), with its name; they get its new values."""

    @classmethod
    def of(cls, model_folder: Path, held: Mapping[str, TensorSpec]) -> Self:
        """The tensors that the policy lacks; only headers are read.

        Args:
            model_folder: The run's initial model.
            held: Specs of the policy's tensors.
        """
        source = open_checkpoint(model_folder)
        table = ParameterTable(source.config, with_mtp=True)
        names = table.mtp_names & source.specs.keys() - held.keys()
        copies = {copy: original for copy, original in table.mtp_copies.items() if copy in names}
        specs = {name: replace(held[copies[name]], name=name) if name in copies else source.specs[name] for name in sorted(names)}
        return cls(source, specs, copies)

    def appended_to(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The policy's tensors, each followed by those that repeat it, then the MTP layers unchanged."""
        repeated: dict[str, list[str]] = {}
        for copy, original in self.copies.items():
            repeated.setdefault(original, []).append(copy)
        for name, tensor in tensors:
            yield name, tensor
            yield from ((copy, tensor) for copy in repeated.get(name, ()))
        yield from ((name, self.source[name]) for name in self.specs if name not in self.copies)


class CompletedCheckpoint:
    """A Megatron checkpoint under Hugging Face names, with the MTP layers of its model folder if it lacks them."""

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self._checkpoint, self._carried = checkpoint, CarriedLayers.of(checkpoint.model_folder, checkpoint.specs)
        self.config: Mapping[str, Any] = checkpoint.config
        self.specs: dict[str, TensorSpec] = checkpoint.specs | self._carried.specs
        self.with_mtp = checkpoint.with_mtp or bool(self._carried.specs)

    def __getitem__(self, name: str) -> Tensor:
        name = self._carried.copies.get(name, name)
        return self._carried.source[name] if name in self._carried.specs else self._checkpoint[name]
