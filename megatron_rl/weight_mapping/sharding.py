"""How a full tensor is sharded over the ranks of a tensor-parallel group: rules that know both directions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.topology import LayoutError


class Sharding(ABC):
    """One rule. `rank` and `size` are those of the group that the parameter is sharded over."""

    @abstractmethod
    def shard_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Shape of each shard.

        Raises:
            LayoutError: The tensor does not divide over `size` ranks.
        """

    @abstractmethod
    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The shard of one rank: a view where the rule allows it."""

    @abstractmethod
    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from all shards in rank order."""


@dataclass(frozen=True)
class Replicated(Sharding):
    """Every rank holds the full tensor."""

    def shard_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """The full shape."""
        return shape

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The full tensor."""
        return full

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The first shard."""
        return shards[0]


REPLICATED = Replicated()


@dataclass(frozen=True)
class Split(Sharding):
    """Sharded along `dim`.

    With `sections` = n, each of n equal blocks is sharded by itself: a rank's shard holds its piece of each block, so that the
    fused gate and up of a rank belong to the same neurons.
    """

    dim: int
    sections: int = 1

    def shard_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """The full shape with `dim` divided by `size`."""
        pieces = self.sections * size
        if shape[self.dim] % pieces:
            block = f" in each of {self.sections} blocks" if self.sections > 1 else ""
            raise LayoutError(
                f"{shape[self.dim] // self.sections} along dimension {self.dim}{block} of shape {list(shape)} "
                f"do not divide over {size} ranks; use a tensor-parallel size that divides them"
            )
        return (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """A view where `sections` is 1."""
        self.shard_shape(tuple(full.shape), size)
        # [..., sections, size, rows, ...] -> this rank's piece of every section
        pieces = full.unflatten(self.dim, (self.sections, size, -1)).select(self.dim + 1, rank)
        return pieces.flatten(self.dim, self.dim + 1)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenated along `dim`, section by section."""
        if self.sections == 1:
            return shards[0] if len(shards) == 1 else torch.cat(list(shards), self.dim)
        pieces = torch.stack([shard.unflatten(self.dim, (self.sections, -1)) for shard in shards], self.dim + 1)
        return pieces.flatten(self.dim, self.dim + 2)
