"""One parameter of the model: its names on both sides, its place in the pipeline, and its kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megatron_rl.layouts.errors import TensorMismatchError
from megatron_rl.layouts.kinds import Kind


class Role(Enum):
    """What a parameter is for; optimizers and quantisers choose by it."""

    EMBEDDING = "embedding"
    OUTPUT = "output"
    NORM = "norm"
    ROUTER = "router"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"

    @property
    def has_matrices(self) -> bool:
        """Its parts are the weight matrices of linear maps between hidden states: what Muon orthogonalises and NVFP4
        quantises."""
        return self in (Role.ATTENTION, Role.MLP, Role.EXPERT)


class Region(Enum):
    """Where in the pipeline a parameter lives."""

    FIRST = "first"
    """The first chunk of the first stage."""
    LAYER = "layer"
    """Wherever its layer is."""
    LAST = "last"
    """The last chunk of the last stage."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor as a Hugging Face checkpoint names it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """Kept in this dtype whatever the model's is; None: the model's."""


@dataclass(frozen=True)
class Parameter:
    """`layer` and `expert` are global numbers; `template` is Megatron's name with {layer} and {expert} open."""

    template: str
    hf: tuple[HfTensor, ...]
    """One for each part of the kind, in its order."""
    kind: Kind
    role: Role
    region: Region
    layer: int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        """Megatron's name with global layer and expert numbers: unique in the model, the same for every layout."""
        return self.template.format(layer=self.layer, expert=self.expert)

    @property
    def shape(self) -> tuple[int, ...]:
        """Megatron's full tensor, padded vocabulary included."""
        return self.kind.shape

    @property
    def is_expert(self) -> bool:
        """Cut over the expert tensor-parallel group and spread over the expert-parallel ranks; otherwise cut over tp."""
        return self.expert is not None

    @property
    def quantisation_group(self) -> str | None:
        """Name of the group whose matrices share one NVFP4 global scale (gate and up; q, k and v), because the server
        multiplies with them in one fused matrix. None for what is never quantised."""
        return self.name if self.role.has_matrices else None

    def from_hf(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Megatron's full tensor from the Hugging Face tensors named in `hf` (others may be present).

        Returns the given tensor itself where nothing has to be rearranged.
        """
        return self.kind.fuse(self._parts(tensors))

    def to_hf(self, full: Tensor) -> list[tuple[str, Tensor]]:
        """Hugging Face names and tensors of a full tensor: views of it where possible, without padded rows."""
        if tuple(full.shape) != self.shape:
            raise TensorMismatchError(f"{self.name}: full shape {list(full.shape)}, expected {list(self.shape)}")
        return [(tensor.name, part) for tensor, part in zip(self.hf, self.kind.split(full), strict=True)]

    def shard_shape(self, size: int) -> tuple[int, ...]:
        return self.kind.sharding.shard_shape(self.shape, size)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The shard of one rank of the group that the parameter is cut over (etp for experts, tp otherwise)."""
        return self.kind.sharding.shard(full, rank, size)

    def shard_from_hf(self, tensors: Mapping[str, Tensor], rank: int, size: int) -> Tensor:
        """`shard(from_hf(tensors), rank, size)` without building the full tensor where possible: of tensors that are
        mapped from a file, only the rank's own rows are read."""
        return self.kind.shard_parts(self._parts(tensors), rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks of the group, in rank order."""
        expected = self.shard_shape(len(shards))
        for rank, shard in enumerate(shards):
            if tuple(shard.shape) != expected:
                raise TensorMismatchError(
                    f"{self.name}: shard {rank} of {len(shards)} has shape {list(shard.shape)}, expected {list(expected)}"
                )
        return self.kind.sharding.unshard(shards)

    def _parts(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        parts = []
        for expected in self.hf:
            found = tensors.get(expected.name)
            if found is None or tuple(found.shape) != expected.shape:
                what = "is missing" if found is None else f"has shape {list(found.shape)}"
                raise TensorMismatchError(f"{self.name}: {expected.name} {what}, expected {list(expected.shape)}")
            parts.append(found)
        return parts
