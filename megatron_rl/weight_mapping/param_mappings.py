"""Kinds of parameters: each knows both directions between Megatron's tensor and the matrices that it is made of.

The parts of a kind are its logical matrices, in the orientation [outputs, inputs] of `torch.nn.Linear`. Each is one Hugging Face
tensor, unless the kind says otherwise (`hf_shapes`). MappingRule counts below are those of full tensors; `split` and `fuse` work on shards as well, because they
derive what they can from the tensor they are given.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron_rl.topology import LayoutError
from megatron_rl.weight_mapping.sharding import REPLICATED, Sharding, Split


class ParamMapping(ABC):
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

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The Hugging Face tensors, in the order of `to_hf`."""
        return self.part_shapes

    def to_hf(self, full: Tensor) -> tuple[Tensor, ...]:
        """The Hugging Face tensors of a full tensor."""
        return self.split(full)

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """The full tensor from the Hugging Face tensors."""
        return self.fuse(tensors)

    def row_pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pieces that make up the full tensor from top to bottom, without padded rows and rearranged as little as possible."""
        return [self.from_hf(tensors)]

    def check_size(self, size: int) -> None:
        """LayoutError when the tensor cannot be cut over `size` ranks."""
        self.sharding.shard_shape(self.shape, size)

    def shard_from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """One rank's shard straight from the Hugging Face tensors; equal to cutting `from_hf(tensors)`, without building it where
        possible."""
        return self.sharding.shard(self.from_hf(tensors), rank, size)


@dataclass(frozen=True)
class DirectMapping(ParamMapping):
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
class GateUpMapping(ParamMapping):
    """First linear of a gated MLP: gate rows above up rows, [2 * width, inputs]; cut per half. Its bias has no inputs: [2 * width]."""

    width: int
    inputs: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.width, *_columns(self.inputs))

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.width, *_columns(self.inputs)),) * 2

    @property
    def sharding(self) -> Sharding:
        return Split(0, sections=2)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        gate, up = full.chunk(2)
        return gate, up

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        gate, up = parts
        return torch.cat([gate, up])

    def row_pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def shard_from_hf(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return self.fuse([Split(0).shard(part, rank, size) for part in parts])


@dataclass(frozen=True)
class QkvMapping(ParamMapping):
    """Fused attention input, [(heads + 2 * groups) * head_dim, inputs]: for each query group its q heads, its k, its v. Its bias has
    no inputs.

    Over more ranks than there are query groups, Megatron cuts the same interleaved tensor into equal row blocks.
    """

    num_heads: int
    num_query_groups: int
    head_dim: int
    inputs: int | None

    @property
    def _rows_per_group(self) -> tuple[int, int, int]:
        """Rows of q, k and v within one query group."""
        return (self.num_heads // self.num_query_groups * self.head_dim, self.head_dim, self.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self._rows_per_group) * self.num_query_groups, *_columns(self.inputs))

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((rows * self.num_query_groups, *_columns(self.inputs)) for rows in self._rows_per_group)

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

    def shard_from_hf(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        if self.num_query_groups % size:
            return super().shard_from_hf(parts, rank, size)
        return self.fuse([Split(0).shard(part, rank, size) for part in parts])


@dataclass(frozen=True)
class VocabularyMapping(ParamMapping):
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

    def row_pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def shard_from_hf(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        (rows,) = parts
        per_rank = self.sharding.shard_shape(self.shape, size)[0]
        return _with_zero_rows(rows[rank * per_rank : (rank + 1) * per_rank], per_rank)


def _columns(inputs: int | None) -> tuple[int, ...]:
    return () if inputs is None else (inputs,)


def _with_zero_rows(rows: Tensor, count: int) -> Tensor:
    missing = count - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass(frozen=True)
class InterleavedGateUpMapping(GateUpMapping):
    """The same in Megatron; Hugging Face holds it as [inputs, 2 * width] with gate and up in turn (GPT-OSS). Bias: [2 * width]."""

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((*_columns(self.inputs), 2 * self.width),)

    def to_hf(self, full: Tensor) -> tuple[Tensor, ...]:
        in_turn = torch.stack(self.split(full), dim=1).flatten(0, 1)  # [2 * width, inputs]: gate 0, up 0, gate 1, ...
        return (in_turn.movedim(0, -1),)

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(self.row_pieces(tensors))

    def row_pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (in_turn,) = tensors
        pairs = in_turn.movedim(-1, 0)
        return [pairs[0::2], pairs[1::2]]

    def shard_from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return self.fuse([Split(0).shard(part, rank, size) for part in self.row_pieces(tensors)])


@dataclass(frozen=True)
class TransposedMapping(DirectMapping):
    """A matrix [outputs, inputs] that Hugging Face holds as [inputs, outputs]."""

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.size[::-1],)

    def to_hf(self, full: Tensor) -> tuple[Tensor, ...]:
        return (full.T,)

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor.T
