"""Pieces of parameters to their owners, and pieces of updates back: two all-to-all exchanges for each round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.optim.assignment import AssignedRound
from megatron_rl.weight_mapping import Parameter
from megatron_rl.weight_mapping.sharding import Replicated

_FP32_BYTES = 4


class Piece(NamedTuple):
    """What one rank holds of one parameter: elements start..stop of the flattened shard `shard_rank` of `num_shards`."""

    name: str
    shard_rank: int
    num_shards: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start


class Transfer:
    """An all-to-all exchange that has been started.

    Args:
        parts: One flat tensor for each rank.
        lengths: Elements that come from each rank.
        group: The ranks of the pipeline stage.
    """

    def __init__(self, parts: Sequence[Tensor], lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        self._lengths, self._work = list(lengths), None
        self._sent = torch.cat(list(parts))
        if group.size() == 1:
            self._received = self._sent
            return
        self._received = self._sent.new_empty(sum(lengths))
        sizes = [part.numel() for part in parts]
        self._work = dist.all_to_all_single(self._received, self._sent, self._lengths, sizes, group=group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """What was received, one flat tensor from each rank."""
        if self._work is not None:
            self._work.wait()
        return self._received.split(self._lengths)


@dataclass(frozen=True)
class Routing:
    """One round on one rank: which pieces it sends to and receives back from each owner, and which parameters it owns itself."""

    outgoing: tuple[tuple[int, ...], ...]
    """For each owner, the numbers of this rank's pieces whose values the owner needs."""
    incoming: tuple[tuple[Piece, ...], ...]
    """For each rank, the pieces whose values this rank receives as their owner."""
    updated: tuple[tuple[int, ...], ...]
    """For each owner, the numbers of this rank's pieces whose updates it receives."""
    returned: tuple[tuple[Piece, ...], ...]
    """For each rank, the pieces whose updates this rank sends as their owner."""
    owned: tuple[Parameter, ...]


def routing_of(assigned: AssignedRound, pieces: Sequence[Sequence[Piece]], rank: int) -> Routing:
    """The exchanges of one round as one rank sees them.

    Args:
        assigned: The round.
        pieces: Pieces of every rank of the stage, in the order in which each sends them.
        rank: Within the stage.
    """
    owner_of = {task.parameter.name: owner for task, owner in zip(assigned.tasks, assigned.owners, strict=True)}
    replicated = _replicated([assigned])

    def is_needed(piece: Piece) -> bool:
        # Every tensor-parallel rank holds all of it; one of the copies is enough, and all of them get the same update.
        return piece.name not in replicated or piece.shard_rank == 0

    def own_pieces(owner: int, *, values: bool) -> tuple[int, ...]:
        return tuple(
            number
            for number, piece in enumerate(pieces[rank])
            if owner_of.get(piece.name) == owner and (not values or is_needed(piece))
        )

    def owned_pieces(sender: int, *, values: bool) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces[sender] if owner_of.get(piece.name) == rank and (not values or is_needed(piece)))

    everyone = range(len(pieces))
    return Routing(
        outgoing=tuple(own_pieces(owner, values=True) for owner in everyone),
        incoming=tuple(owned_pieces(sender, values=True) for sender in everyone),
        updated=tuple(own_pieces(owner, values=False) for owner in everyone),
        returned=tuple(owned_pieces(sender, values=False) for sender in everyone),
        owned=tuple(task.parameter for task, owner in zip(assigned.tasks, assigned.owners, strict=True) if owner == rank),
    )


def bytes_sent(rounds: Sequence[AssignedRound], pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """Bytes that each rank of the stage sends to others in one step: directions to their owners and updates back, fp32.

    Args:
        rounds: The Muon assignment.
        pieces: Pieces of every rank of the stage.
    """
    owner_of = {task.parameter.name: owner for each in rounds for task, owner in zip(each.tasks, each.owners, strict=True)}
    replicated = _replicated(rounds)
    sent = [0] * len(pieces)
    for rank, held in enumerate(pieces):
        for piece in held:
            owner = owner_of[piece.name]
            if owner != rank:
                sent[owner] += _FP32_BYTES * piece.length
                sent[rank] += _FP32_BYTES * piece.length if piece.name not in replicated or piece.shard_rank == 0 else 0
    return sent


def _replicated(rounds: Sequence[AssignedRound]) -> set[str]:
    """Names of parameters of which every tensor-parallel rank holds all."""
    tasks = (task for each in rounds for task in each.tasks)
    return {task.parameter.name for task in tasks if isinstance(task.parameter.mapping.sharding, Replicated)}


def assemble(routing: Routing, received: Sequence[Tensor]) -> dict[str, Tensor]:
    """Megatron's full tensor of each owned parameter, by name, from its pieces.

    Args:
        routing: Routing of the round.
        received: From each rank, the incoming pieces as one flat tensor.
    """
    shards: dict[str, dict[int, Tensor]] = {parameter.name: {} for parameter in routing.owned}
    by_name = {parameter.name: parameter for parameter in routing.owned}
    for pieces, flat in zip(routing.incoming, received, strict=True):
        for piece, values in zip(pieces, flat.split([piece.length for piece in pieces]), strict=True):
            found = shards[piece.name]
            if piece.shard_rank not in found:
                shape = by_name[piece.name].shard_shape(piece.num_shards)
                found[piece.shard_rank] = flat.new_empty(shape)
            found[piece.shard_rank].view(-1)[piece.start : piece.stop] = values
    return {name: by_name[name].unshard([found[number] for number in sorted(found)]) for name, found in shards.items()}


def split_updates(routing: Routing, full: dict[str, Tensor], like: Tensor) -> list[Tensor]:
    """For each rank the pieces of full tensors that it gets back, as one flat tensor.

    Args:
        routing: Routing of the round.
        full: Megatron's full tensor of each owned parameter, by name.
        like: A rank without pieces gets an empty tensor of its dtype and device.
    """
    by_name = {parameter.name: parameter for parameter in routing.owned}
    shards: dict[tuple[str, int], Tensor] = {}
    parts = []
    for pieces in routing.returned:
        values = []
        for piece in pieces:
            key = (piece.name, piece.shard_rank)
            if key not in shards:
                shards[key] = by_name[piece.name].shard(full[piece.name], piece.shard_rank, piece.num_shards).reshape(-1)
            values.append(shards[key][piece.start : piece.stop])
        parts.append(torch.cat(values) if values else like.new_empty(0))
    return parts
