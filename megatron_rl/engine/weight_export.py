"""The complete model under Hugging Face names, gathered to rank 0 bucket by bucket."""

import copy
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weight_mapping import Assembly, HeldParameter, Parameter, Placement, names_completed_by
from megatron_rl.wire.tensor_spec import TensorSpec

_BUCKET_BYTES = 64 * 2**20


class WeightExport:
    """All tensors of the model, in the table's order. It can be iterated again, and then gives the values of that moment.

    Iterating is a collective: every rank iterates over all of it, rank 0 gets (name, tensor) and the others (name, None). A
    tensor may be a view of a parameter: it is valid until the weights change. It has the dtype of its spec, also where a module
    holds another one (Transformer Engine's attention sinks are fp32).

    Args:
        placement: Placement of the model, at the run's layout.
        rank: This process's global rank.
        device: Where parts are received.
        dtype: Dtype of tensors for which the table names none.
        shard_of: This rank's part of a parameter, of the shard's shape.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        shard_of: Callable[[HeldParameter], Tensor],
    ) -> None:
        self._placement, self._rank, self._device, self._dtype, self._shard_of = placement, rank, device, dtype, shard_of
        self._held = {held.parameter.name: held for held in placement.held_by(rank).values() if not held.is_tied_copy}
        self._left_out: frozenset[str] = frozenset()

    def without(self, names: set[str]) -> Self:
        """The same without these tensors, which are not sent either."""
        fewer = copy.copy(self)
        fewer._left_out = self._left_out | names  # noqa: SLF001 - a copy of the same class
        return fewer

    @property
    def specs(self) -> list[TensorSpec]:
        """Known on every rank, without communication."""
        specs = self._placement.table.hf_specs(self._dtype)
        return [spec for name, spec in specs.items() if name not in self._left_out]

    def __len__(self) -> int:
        return len(self._placement.table.hf_shapes.keys() - self._left_out)

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        assembly = Assembly()
        for bucket in self._buckets():
            shards = self._exchange(bucket)
            for parameter in bucket:
                if self._rank == 0:
                    yield from assembly.add(parameter, parameter.unshard(shards[parameter.name]))
                else:
                    yield from ((name, None) for name in names_completed_by(parameter))

    def _buckets(self) -> Iterator[list[Parameter]]:
        """Neighbours of one dtype whose full tensors have about _BUCKET_BYTES: the same cuts on every rank."""
        bucket: list[Parameter] = []
        size = 0
        for parameter in self._placement.table.parameters:
            if parameter.hf[0].name in self._left_out:
                continue
            if bucket and self._dtype_of(bucket) != self._dtype_of([parameter]):
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += prod(parameter.shape) * self._dtype_of(bucket).itemsize
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def _dtype_of(self, bucket: Sequence[Parameter]) -> torch.dtype:
        return bucket[0].dtype or self._dtype

    def _exchange(self, bucket: Sequence[Parameter]) -> dict[str, list[Tensor]]:
        """Shards of each parameter in the order of its owners, on rank 0; each owner sends what it has in one message."""
        mine = [self._held[p.name] for p in bucket if self._rank in self._placement.owners(p)]
        if self._rank != 0:
            if mine:
                dist.send(torch.cat([self._exported(held).flatten() for held in mine]), dst=0)
            return {}
        own = {held.parameter.name: self._exported(held) for held in mine}
        received = {owner: self._receive(bucket, owner) for owner in self._senders(bucket)}
        return {
            p.name: [own[p.name] if owner == 0 else received[owner][p.name] for owner in self._placement.owners(p)]
            for p in bucket
        }

    def _exported(self, held: HeldParameter) -> Tensor:
        return self._shard_of(held).detach().to(self._dtype_of([held.parameter]))

    def _senders(self, bucket: Sequence[Parameter]) -> list[int]:
        return sorted({owner for parameter in bucket for owner in self._placement.owners(parameter)} - {0})

    def _receive(self, bucket: Sequence[Parameter], owner: int) -> dict[str, Tensor]:
        parts = [p for p in bucket if owner in self._placement.owners(p)]
        shapes = [p.shard_shape(len(self._placement.owners(p))) for p in parts]
        flat = torch.empty(sum(map(prod, shapes)), dtype=self._dtype_of(bucket), device=self._device)
        dist.recv(flat, src=owner)
        pieces = flat.split([prod(shape) for shape in shapes])
        return {p.name: piece.view(shape) for p, piece, shape in zip(parts, pieces, shapes, strict=True)}
