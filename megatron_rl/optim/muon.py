"""One step of Muon on the ranks of a pipeline stage; the update is that of the logical matrices, whatever the layout.

round 0  gather ─▶ orthogonalise ─▶ send back ─▶ apply
round 1     gather ──────────────▶ orthogonalise ─▶ send back ─▶ apply
             overlaps with round 0                   overlaps with round 1
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.optim.assignment import AssignedRound
from megatron_rl.optim.exchange import Piece, Routing, Transfer, assemble, routing_of, split_updates
from megatron_rl.optim.newton_schulz import orthogonalise, update_scale
from megatron_rl.optim.reference import MuonRates, MuonSettings
from megatron_rl.weight_mapping import Parameter

_BATCH_ELEMENTS = 16 * 2**20
"""Equal matrices are orthogonalised together up to so many elements: the iteration holds a few copies of them."""


@dataclass(frozen=True)
class HeldPiece:
    """This rank's state of a piece: flat fp32 tensors of piece.length elements. A step changes all three in place."""

    weight: Tensor
    momentum: Tensor
    gradient: Tensor


class DistributedMuon:
    """The part of Muon that one rank runs. Construction and `step` are collectives of the stage.

    Args:
        settings: Settings of the run.
        rounds: The Muon assignment of the stage, the same on all its ranks.
        pieces: This rank's. Together the ranks hold every element of each shard once.
        group: The ranks of the pipeline stage.
        device: Device of the pieces.
    """

    def __init__(
        self,
        settings: MuonSettings,
        rounds: Sequence[AssignedRound],
        pieces: Sequence[Piece],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._settings, self._group, self._device = settings, group, device
        self._lengths = [piece.length for piece in pieces]
        of_all: list[list[Piece]] = [[] for _ in range(group.size())]
        dist.all_gather_object(of_all, list(pieces), group=group)
        self._routings = [routing_of(each, of_all, group.rank()) for each in rounds]

    @torch.no_grad()
    def step(self, held: Sequence[HeldPiece], rates: MuonRates) -> None:
        """Update weights and momenta in place.

        Args:
            held: The state of each of this rank's pieces, in their order. The gradients are overwritten.
            rates: Rates of this step.
        """
        if not self._routings:
            return
        gathering = self._gather(self._routings[0], held)
        returning: tuple[Routing, Transfer] | None = None
        for number, routing in enumerate(self._routings):
            received = gathering.wait()
            if number + 1 < len(self._routings):
                gathering = self._gather(self._routings[number + 1], held)
            updates = updates_of(routing.owned, assemble(routing, received), self._settings)
            if returning:
                self._apply(*returning, held, rates)
            parts = split_updates(routing, updates, received[0])
            returning = routing, Transfer(parts, [self._length(numbers) for numbers in routing.updated], self._group)
        if returning:
            self._apply(*returning, held, rates)

    def _gather(self, routing: Routing, held: Sequence[HeldPiece]) -> Transfer:
        """Update the momentum of the round's pieces, and send Nesterov's direction to the owners."""
        beta = self._settings.momentum
        for each in (held[number] for numbers in routing.updated for number in numbers):
            each.momentum.mul_(beta).add_(each.gradient)
            each.gradient.add_(each.momentum, alpha=beta)
        nothing = torch.empty(0, device=self._device)
        parts = [torch.cat([held[n].gradient for n in numbers]) if numbers else nothing for numbers in routing.outgoing]
        return Transfer(parts, [sum(piece.length for piece in pieces) for pieces in routing.incoming], self._group)

    def _apply(self, routing: Routing, transfer: Transfer, held: Sequence[HeldPiece], rates: MuonRates) -> None:
        for numbers, flat in zip(routing.updated, transfer.wait(), strict=True):
            for number, update in zip(numbers, flat.split([self._lengths[n] for n in numbers]), strict=True):
                held[number].weight.mul_(1 - rates.learning_rate * rates.weight_decay).add_(update, alpha=-rates.learning_rate)

    def _length(self, numbers: Iterable[int]) -> int:
        return sum(self._lengths[number] for number in numbers)


def updates_of(parameters: Sequence[Parameter], directions: dict[str, Tensor], settings: MuonSettings) -> dict[str, Tensor]:
    """Orthogonalise each logical matrix by itself, those of one shape in one batch.

    Args:
        parameters: What is updated.
        directions: Nesterov's direction of each, Megatron's full fp32 tensor, by name.
        settings: Settings of the run.

    Returns:
        Megatron's full tensor of each update, fp32, by name.
    """
    parts = {p.name: list(p.mapping.split(directions[p.name])) for p in parameters}
    by_shape: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, matrices in parts.items():
        for place, matrix in enumerate(matrices):
            by_shape.setdefault(tuple(matrix.shape), []).append((name, place))
    for shape, places in by_shape.items():
        rows, columns = shape
        batch_size = max(1, _BATCH_ELEMENTS // (rows * columns))
        for first in range(0, len(places), batch_size):
            batch = places[first : first + batch_size]
            stacked = torch.stack([parts[name][place] for name, place in batch]).to(settings.newton_schulz_dtype)
            found = orthogonalise(stacked, settings.newton_schulz_steps).float().mul_(update_scale(rows, columns))
            for (name, place), matrix in zip(batch, found, strict=True):
                parts[name][place] = matrix
    return {p.name: p.mapping.fuse(parts[p.name]) for p in parameters}
