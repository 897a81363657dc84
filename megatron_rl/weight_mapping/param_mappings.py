"""Parameter mappings: each knows both directions between Megatron's tensor and the matrices that it is made of.

The parts of a mapping are its logical matrices, in the orientation [outputs, inputs] of `torch.nn.Linear`. Each is one Hugging
Face tensor, unless the mapping says otherwise (`hf_shapes`). Row counts below are those of full tensors; `split` and `fuse` work
on shards as well, because they derive what they can from the tensor that they are given.
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
    """Shapes and rearrangement of a parameter, the same for all layers and experts that have it."""

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
        """How the full tensor is sharded over its tensor-parallel group."""

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
        """Return if the tensor can be sharded over `size` ranks.

        Raises:
            LayoutError: It cannot.
        """
        self.sharding.shard_shape(self.shape, size)

    def shard_from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """One rank's shard straight from the Hugging Face tensors.

        Equal to the shard of `from_hf(tensors)`, which is not built where that can be avoided: of memory-mapped tensors, only the
        rank's own rows are read then.

        Args:
            tensors: The Hugging Face tensors, in the order of `hf_shapes`.
            rank: In the group that the parameter is sharded over.
            size: Size of that group.
        """
        return self.sharding.shard(self.from_hf(tensors), rank, size)


@dataclass(frozen=True)
class DirectMapping(ParamMapping):
    """One matrix or vector that is the same on both sides."""

    size: tuple[int, ...]
    cut: Sharding = REPLICATED

    @property
    def shape(self) -> tuple[int, ...]:
        """`size`."""
        return self.size

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One part: the tensor itself."""
        return (self.size,)

    @property
    def sharding(self) -> Sharding:
        """`cut`."""
        return self.cut

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """The tensor itself."""
        return (full,)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The part itself."""
        (part,) = parts
        return part


@dataclass(frozen=True)
class GateUpMapping(ParamMapping):
    """First linear layer of a gated MLP: gate rows above up rows, [2 * width, inputs]; each half is sharded by itself.

    Its bias has no inputs: [2 * width].
    """

    width: int
    inputs: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """[2 * width, inputs]."""
        return (2 * self.width, *_columns(self.inputs))

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Gate and up, [width, inputs] each."""
        return ((self.width, *_columns(self.inputs)),) * 2

    @property
    def sharding(self) -> Sharding:
        """Sharded by rows, gate and up each by itself."""
        return Split(0, sections=2)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """Gate and up: views."""
        gate, up = full.chunk(2)
        return gate, up

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """Gate above up."""
        gate, up = parts
        return torch.cat([gate, up])

    def row_pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gate, then up, as they are."""
        return list(tensors)

    def shard_from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """A rank's rows of gate above its rows of up."""
        return self.fuse([Split(0).shard(part, rank, size) for part in tensors])


@dataclass(frozen=True)
class QkvMapping(ParamMapping):
    """Fused attention input, [(heads + 2 * groups) * head_dim, inputs]: for each query group its q heads, its k, its v.

    Its bias has no inputs. Over more ranks than there are query groups, Megatron shards the same interleaved tensor into equal
    row blocks.
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
        """[(heads + 2 * groups) * head_dim, inputs]."""
        return (sum(self._rows_per_group) * self.num_query_groups, *_columns(self.inputs))

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """q [heads * head_dim, inputs], k and v [groups * head_dim, inputs]."""
        return tuple((rows * self.num_query_groups, *_columns(self.inputs)) for rows in self._rows_per_group)

    @property
    def sharding(self) -> Sharding:
        """Sharded by rows of the interleaved tensor."""
        return Split(0)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """q, k and v."""
        groups = full.unflatten(0, (-1, sum(self._rows_per_group)))  # [groups, rows of a group, inputs]
        return tuple(part.flatten(0, 1) for part in groups.split(self._rows_per_group, dim=1))

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """Interleaved by query group."""
        q, k, v = (part.unflatten(0, (-1, rows)) for part, rows in zip(parts, self._rows_per_group, strict=True))
        return torch.cat([q, k, v], dim=1).flatten(0, 1)

    def check_size(self, size: int) -> None:
        """See ParamMapping; the heads and the query groups must divide, too."""
        groups = self.num_query_groups
        if self.num_heads % size or (groups % size and size % groups):
            raise LayoutError(
                f"{self.num_heads} heads in {groups} query groups do not divide over {size} ranks; the tensor-parallel size "
                "has to divide the heads, and to divide the query groups or be a multiple of them"
            )
        super().check_size(size)

    def shard_from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """A rank's query groups, unless it has only a part of one."""
        if self.num_query_groups % size:
            return super().shard_from_hf(tensors, rank, size)
        return self.fuse([Split(0).shard(part, rank, size) for part in tensors])


@dataclass(frozen=True)
class VocabularyMapping(ParamMapping):
    """Embedding or output layer. Megatron's tensor has rows of zeros after the vocabulary, so that it divides over tp."""

    vocab_size: int
    padded_vocab_size: int
    columns: int

    def __post_init__(self) -> None:
        if self.padded_vocab_size < self.vocab_size:
            raise LayoutError(f"padded vocabulary {self.padded_vocab_size} is smaller than the vocabulary {self.vocab_size}")

    @property
    def shape(self) -> tuple[int, ...]:
        """[padded_vocab_size, columns]."""
        return (self.padded_vocab_size, self.columns)

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Without padding: [vocab_size, columns]."""
        return ((self.vocab_size, self.columns),)

    @property
    def sharding(self) -> Sharding:
        """Sharded by rows."""
        return Split(0)

    def split(self, full: Tensor) -> tuple[Tensor, ...]:
        """The rows without padding: a view."""
        return (full[: self.vocab_size],)

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The matrix padded with rows of zeros."""
        (rows,) = parts
        return _with_zero_rows(rows, self.padded_vocab_size)

    def row_pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows without padding."""
        return list(tensors)

    def shard_from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """A rank's rows, with zeros where they are padding."""
        (rows,) = tensors
        per_rank = self.sharding.shard_shape(self.shape, size)[0]
        return _with_zero_rows(rows[rank * per_rank : (rank + 1) * per_rank], per_rank)


def _columns(inputs: int | None) -> tuple[int, ...]:
    return () if inputs is None else (inputs,)


def _with_zero_rows(rows: Tensor, count: int) -> Tensor:
    missing = count - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass(frozen=True)
class InterleavedGateUpMapping(GateUpMapping):
    """GateUpMapping in Megatron; in Hugging Face [inputs, 2 * width] with interleaved columns of gate and up (GPT-OSS).

    Bias: [2 * width].
    """

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[inputs, 2 * width]; bias [2 * width]."""
        return ((*_columns(self.inputs), 2 * self.width),)

    def to_hf(self, full: Tensor) -> tuple[Tensor, ...]:
        """Columns of gate and up in turn."""
        interleaved = torch.stack(self.split(full), dim=1).flatten(0, 1)  # [2 * width, inputs]: gate 0, up 0, gate 1, ...
        return (interleaved.movedim(0, -1),)

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """Gate above up, [2 * width, inputs]."""
        return torch.cat(self.row_pieces(tensors))

    def row_pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gate, then up: strided views."""
        (interleaved,) = tensors
        pairs = interleaved.movedim(-1, 0)
        return [pairs[0::2], pairs[1::2]]

    def shard_from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """A rank's rows of gate above its rows of up."""
        return self.fuse([Split(0).shard(part, rank, size) for part in self.row_pieces(tensors)])


@dataclass(frozen=True)
class TransposedMapping(DirectMapping):
    """A matrix [outputs, inputs] that is [inputs, outputs] in Hugging Face."""

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[inputs, outputs]."""
        return (self.size[::-1],)

    def to_hf(self, full: Tensor) -> tuple[Tensor, ...]:
        """The transpose: a view."""
        return (full.T,)

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """The transpose: a view."""
        (tensor,) = tensors
        return tensor.T
