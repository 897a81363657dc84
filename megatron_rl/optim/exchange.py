"""Pieces of parameters to their owners, and pieces of updates back: two all-to-all exchanges for each round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.optim.assignment import Round
from megatron_rl.weight_mapping import Parameter
from megatron_rl.weight_mapping.sharding import Replicated


class Piece(NamedTuple):
    """What one rank holds of one parameter: elements start..stop of the flattened shard `shard_rank` of `num_shards`."""

    name: str
    shard_rank: int
    num_shards: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Transfer:
    """An exchange under way; `wait` gives what has come, one flat tensor from each rank."""

    def __init__(self, parts: Sequence[Tensor], lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        """parts: one flat tensor for each rank. lengths: elements that come from each rank."""
        self._lengths, self._work = list(lengths), None
        self._sent = torch.cat(list(parts))
        if group.size() == 1:
            self._received = self._sent
            return
        self._received = self._sent.new_empty(sum(lengths))
        sizes = [part.numel() for part in parts]
        self._work = dist.all_to_all_single(self._received, self._sent, self._lengths, sizes, group=group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        if self._work is not None:
            self._work.wait()
        return self._received.split(self._lengths)


@dataclass(frozen=True)
class Routing:
    """Of one round: which pieces this rank sends to and gets back from each owner, and which it brings together itself."""

    outgoing: tuple[tuple[int, ...], ...]
    """By owner: numbers of this rank's pieces whose values the owner needs."""
    incoming: tuple[tuple[Piece, ...], ...]
    """By rank: pieces whose values come to this rank as their owner."""
    updated: tuple[tuple[int, ...], ...]
    """By owner: numbers of this rank's pieces whose updates come back."""
    owed: tuple[tuple[Piece, ...], ...]
    """By rank: pieces whose updates this rank sends."""
    owned: tuple[Parameter, ...]


def routing_of(one: Round, pieces: Sequence[Sequence[Piece]], rank: int) -> Routing:
    """pieces: of every rank of the group, in the order in which each sends them."""
    owner_of = {task.parameter.name: owner for task, owner in zip(one.tasks, one.owners, strict=True)}
    whole = {task.parameter.name for task in one.tasks if isinstance(task.parameter.mapping.sharding, Replicated)}

    def is_needed(piece: Piece) -> bool:
        # Every tensor-parallel rank holds all of it; one of the copies is enough, and all of them get the same update.
        return piece.name not in whole or piece.shard_rank == 0

    def mine(owner: int, *, values: bool) -> tuple[int, ...]:
        return tuple(
            number
            for number, piece in enumerate(pieces[rank])
            if owner_of.get(piece.name) == owner and (not values or is_needed(piece))
        )

    def theirs(sender: int, *, values: bool) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces[sender] if owner_of.get(piece.name) == rank and (not values or is_needed(piece)))

    everyone = range(len(pieces))
    return Routing(
        outgoing=tuple(mine(owner, values=True) for owner in everyone),
        incoming=tuple(theirs(sender, values=True) for sender in everyone),
        updated=tuple(mine(owner, values=False) for owner in everyone),
        owed=tuple(theirs(sender, values=False) for sender in everyone),
        owned=tuple(task.parameter for task, owner in zip(one.tasks, one.owners, strict=True) if owner == rank),
    )


def bytes_sent(rounds: Sequence[Round], pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """By rank, in one step: directions to their owners and updates back, fp32; what a rank owes itself stays where it is."""
    owner_of = {task.parameter.name: owner for one in rounds for task, owner in zip(one.tasks, one.owners, strict=True)}
    whole = {
        task.parameter.name for one in rounds for task in one.tasks if isinstance(task.parameter.mapping.sharding, Replicated)
    }
    sent = [0] * len(pieces)
    for rank, held in enumerate(pieces):
        for piece in held:
            owner = owner_of[piece.name]
            if owner != rank:
                sent[owner] += 4 * piece.length
                sent[rank] += 4 * piece.length if piece.name not in whole or piece.shard_rank == 0 else 0
    return sent


def bring_together(routing: Routing, received: Sequence[Tensor]) -> dict[str, Tensor]:
    """Megatron's full tensor of each owned parameter, by name, from its pieces."""
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


def cut_up(routing: Routing, full: dict[str, Tensor], like: Tensor) -> list[Tensor]:
    """For each rank the owed pieces of full tensors, one flat tensor; of the dtype and device of `like`."""
    by_name = {parameter.name: parameter for parameter in routing.owned}
    shards: dict[tuple[str, int], Tensor] = {}
    parts = []
    for pieces in routing.owed:
        values = []
        for piece in pieces:
            key = (piece.name, piece.shard_rank)
            if key not in shards:
                shards[key] = by_name[piece.name].shard(full[piece.name], piece.shard_rank, piece.num_shards).reshape(-1)
            values.append(shards[key][piece.start : piece.stop])
        parts.append(torch.cat(values) if values else like.new_empty(0))
    return parts
