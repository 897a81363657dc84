"""Kinds of parameters: each knows both directions between Megatron's tensor and the matrices that it is made of.

The parts of a kind are its logical matrices, in the orientation [outputs, inputs] of `torch.nn.Linear`, and each is one
Hugging Face tensor. Row counts below are those of full tensors; `split` and `fuse` work on shards as well, because they
derive what they can from the tensor they are given.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron_rl.layouts.sharding import REPLICATED, Sharding, Split
from megatron_rl.topology import LayoutError


class Kind(ABC):
    """Shapes and rearrangement of one sort of parameter, the same for all layers and experts that have it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Megatron's full tensor (all ranks together)."""

    @property
    @abstractmethod
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The logical matrices (or the one vector), in the order of `split`."""

    @property
    @abstractmethod
    def sharding(self) -> Sharding:
        """How the full tensor is cut over its tensor-parallel group."""

    @abstractmethod
    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """The parts of a full tensor: views where the memory order allows it."""

    @abstractmethod
    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The full tensor from its parts: the part itself where there is only one."""

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Pieces that make up the full tensor from top to bottom, without padded rows and rearranged as little as possible."""
        return [self.fuse(parts)]

    def check_size(self, size: int) -> None:
        """LayoutError when the tensor cannot be cut over `size` ranks."""
        self.sharding.shard_shape(self.shape, size)

    def shard_parts(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """One rank's shard straight from the parts; equal to cutting `fuse(parts)`, without building it where possible."""
        return self.sharding.shard(self.fuse(parts), rank, size)


@dataclass(frozen=True)
class Single(Kind):
    """One matrix or vector that is the same on both sides."""

    size: tuple[int, ...]
    cut: Sharding = REPLICATED

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.size,)

    @property
    def sharding(self) -> Sharding:
        return self.cut

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full,)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part


@dataclass(frozen=True)
class GateUp(Kind):
    """First linear of a SwiGLU MLP: gate rows above up rows, [2 * width, inputs]; cut per half."""

    width: int
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.width, self.inputs)

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.width, self.inputs),) * 2

    @property
    def sharding(self) -> Sharding:
        return Split(0, sections=2)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        gate, up = full.chunk(2)
        return gate, up

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        gate, up = parts
        return torch.cat([gate, up])

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def shard_parts(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return self.fuse([Split(0).shard(part, rank, size) for part in parts])


@dataclass(frozen=True)
class QueryKeyValue(Kind):
    """Fused attention input, [(heads + 2 * groups) * head_dim, inputs]: for each query group its q heads, its k, its v.

    Over more ranks than there are query groups, Megatron cuts the same interleaved tensor into equal row blocks.
    """

    num_heads: int
    num_query_groups: int
    head_dim: int
    inputs: int

    @property
    def _rows_per_group(self) -> tuple[int, int, int]:
        """Rows of q, k and v within one query group."""
        return (self.num_heads // self.num_query_groups * self.head_dim, self.head_dim, self.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self._rows_per_group) * self.num_query_groups, self.inputs)

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((rows * self.num_query_groups, self.inputs) for rows in self._rows_per_group)

    @property
    def sharding(self) -> Sharding:
        return Split(0)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        groups = full.unflatten(0, (-1, sum(self._rows_per_group)))  # [groups, rows of a group, inputs]
        return tuple(part.flatten(0, 1) for part in groups.split(self._rows_per_group, dim=1))

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        q, k, v = (part.unflatten(0, (-1, rows)) for part, rows in zip(parts, self._rows_per_group, strict=True))
        return torch.cat([q, k, v], dim=1).flatten(0, 1)

    def check_size(self, size: int) -> None:
        groups = self.num_query_groups
        if self.num_heads % size or (groups % size and size % groups):
            raise LayoutError(
                f"{self.num_heads} heads in {groups} query groups do not divide over {size} ranks; the tensor-parallel size "
                "has to divide the heads, and to divide the query groups or be a multiple of them"
            )
        super().check_size(size)

    def shard_parts(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        if self.num_query_groups % size:
            return super().shard_parts(parts, rank, size)
        return self.fuse([Split(0).shard(part, rank, size) for part in parts])


@dataclass(frozen=True)
class VocabularyRows(Kind):
    """Embedding or output layer. Megatron's tensor has rows of zeros below the vocabulary, so that it divides over tp."""

    vocab_size: int
    padded_vocab_size: int
    columns: int

    def __post_init__(self) -> None:
        if self.padded_vocab_size < self.vocab_size:
            raise LayoutError(f"padded vocabulary {self.padded_vocab_size} is smaller than the vocabulary {self.vocab_size}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.padded_vocab_size, self.columns)

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.vocab_size, self.columns),)

    @property
    def sharding(self) -> Sharding:
        return Split(0)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full[: self.vocab_size],)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        (rows,) = parts
        return _with_zero_rows(rows, self.padded_vocab_size)

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def shard_parts(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        (rows,) = parts
        per_rank = self.sharding.shard_shape(self.shape, size)[0]
        return _with_zero_rows(rows[rank * per_rank : (rank + 1) * per_rank], per_rank)


def _with_zero_rows(rows: Tensor, count: int) -> Tensor:
    missing = count - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
