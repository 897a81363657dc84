"""One parameter of the model: its names in Megatron and Hugging Face, its place in the pipeline, and its mapping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron_rl.weight_mapping.errors import TensorMismatchError
from megatron_rl.weight_mapping.param_mappings import ParamMapping


class Role(Enum):
    """What a parameter is for; optimizers and quantisers select by it."""

    EMBEDDING = "embedding"
    OUTPUT = "output"
    NORM = "norm"
    ROUTER = "router"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    BIAS = "bias"
    """Biases of linear layers, and attention sinks."""
    SELECTION_BIAS = "selection_bias"
    """The router's vector without a gradient: a buffer in Megatron."""

    @property
    def has_matrices(self) -> bool:
        """Whether its parts are matrices of linear layers between hidden states: what Muon orthogonalises and NVFP4 quantises."""
        return self in (Role.ATTENTION, Role.MLP, Role.EXPERT)


class Region(Enum):
    """Where in the pipeline a parameter is."""

    FIRST = "first"
    """The first chunk of the first stage."""
    LAYER = "layer"
    """The parameter is in the chunk of its layer."""
    LAST = "last"
    """The last chunk of the last stage."""


@dataclass(frozen=True)
class HfSlot:
    """The tensor of a Hugging Face checkpoint that a parameter fills, or one entry of it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    dtype: torch.dtype | None = None
    """Kept in this dtype whatever the model's is; None: the model's."""
    index: int | None = None
    """Given: the parameter is this entry of the leading dimension, and other parameters (experts) fill the rest."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """What one parameter contributes."""
        return self.shape if self.index is None else self.shape[1:]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the complete model, before it is sharded."""

    template: str
    """Megatron's name with {layer} and {expert} as placeholders."""
    hf: tuple[HfSlot, ...]
    """One for each of the mapping's `hf_shapes`, in that order."""
    mapping: ParamMapping
    role: Role
    region: Region
    layer: int | None = None
    """Global number; None outside of the layers."""
    expert: int | None = None
    """Global number; None for what is no expert's."""
    scale_shared_with: str | None = None
    """Template of the parameter whose quantisation group this one is in; None: its own group."""

    @property
    def name(self) -> str:
        """Megatron's name with global layer and expert numbers: unique in the model, the same for every layout."""
        return self.template.format(layer=self.layer, expert=self.expert)

    @property
    def shape(self) -> tuple[int, ...]:
        """Megatron's full tensor, padded vocabulary included."""
        return self.mapping.shape

    @property
    def dtype(self) -> torch.dtype | None:
        """Given: kept in this dtype whatever the model's is."""
        return self.hf[0].dtype

    @property
    def is_expert(self) -> bool:
        """True: sharded over the expert tensor-parallel group, on one of the expert-parallel ranks. False: sharded over tp."""
        return self.expert is not None

    @property
    def quantisation_group(self) -> str | None:
        """Name of the group whose matrices share one NVFP4 global scale; None for what is never quantised.

        The server fuses the matrices of a group into one: gate and up; q, k and v; MLA's two down projections.
        """
        template = self.scale_shared_with or self.template
        return template.format(layer=self.layer, expert=self.expert) if self.role.has_matrices else None

    def from_hf(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Megatron's full tensor from the Hugging Face tensors named in `hf` (others may be present).

        Returns the given tensor itself where nothing has to be rearranged.
        """
        return self.mapping.from_hf(self.parts_of(tensors))

    def to_hf(self, full: Tensor) -> list[tuple[str, Tensor]]:
        """Hugging Face names and tensors of a full tensor.

        Args:
            full: Megatron's full tensor.

        Returns:
            Views of it where possible, without padded rows. Of a tensor that several parameters fill, only this parameter's
            entry; Assembly puts the entries together.

        Raises:
            TensorMismatchError: `full` has a wrong shape.
        """
        if tuple(full.shape) != self.shape:
            raise TensorMismatchError(f"{self.name}: full tensor has shape {list(full.shape)}, expected {list(self.shape)}")
        return [(tensor.name, part) for tensor, part in zip(self.hf, self.mapping.to_hf(full), strict=True)]

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """Shape of each shard over a group of `size` ranks."""
        return self.mapping.sharding.shard_shape(self.shape, size)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The shard of one rank of the group that the parameter is sharded over (etp for experts, tp otherwise)."""
        return self.mapping.sharding.shard(full, rank, size)

    def shard_from_hf(self, tensors: Mapping[str, Tensor], rank: int, size: int) -> Tensor:
        """`shard(from_hf(tensors), rank, size)` without building the full tensor where possible.

        Of memory-mapped tensors, only the rank's own rows are read.
        """
        return self.mapping.shard_from_hf(self.parts_of(tensors), rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks of the group, in rank order.

        Raises:
            TensorMismatchError: A shard has a wrong shape.
        """
        expected = self.shard_shape(len(shards))
        for rank, shard in enumerate(shards):
            if tuple(shard.shape) != expected:
                raise TensorMismatchError(
                    f"{self.name}: shard {rank} of {len(shards)} has shape {list(shard.shape)}, expected {list(expected)}"
                )
        return self.mapping.sharding.unshard(shards)

    def parts_of(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The Hugging Face tensors that it is made from, or its entries of those that it shares with other parameters.

        Raises:
            TensorMismatchError: One is missing or has a wrong shape.
        """
        parts = []
        for expected in self.hf:
            found = tensors.get(expected.name)
            if found is None or tuple(found.shape) != expected.shape:
                what = "is missing" if found is None else f"has shape {list(found.shape)}"
                raise TensorMismatchError(f"{self.name}: {expected.name} {what}, expected {list(expected.shape)}")
            parts.append(found if expected.index is None else found[expected.index])
        return parts
