"""The Muon assignment: which rank orthogonalises what, and in which order. A pure function of sizes, the same on every rank.

The ranks of a pipeline stage hold the stage's matrices in pieces (tensor parallelism cuts matrices, the distributed optimizer
cuts what is left over the data-parallel ranks). For each parameter one rank, its owner, collects the pieces, orthogonalises its
logical matrices and sends the pieces of the update back. This is done in rounds of complete layers, so that the exchange of one
round overlaps with the work of another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.optim.newton_schulz import flops
from megatron_rl.weight_mapping import Parameter, Placement


@dataclass(frozen=True)
class MuonTask:
    """One parameter of the stage: all logical matrices in it have the same owner."""

    parameter: Parameter
    candidates: tuple[int, ...]
    """Ranks within the stage that hold a piece of it: one of them becomes its owner."""
    flops: int

    @property
    def elements(self) -> int:
        """Number of elements of the parameter's logical matrices."""
        return sum(rows * columns for rows, columns in self.parameter.mapping.part_shapes)


@dataclass(frozen=True)
class AssignedRound:
    """Complete layers, exchanged and orthogonalised together."""

    tasks: tuple[MuonTask, ...]
    owners: tuple[int, ...]
    """The owner of each task: a rank within the stage."""


def stage_tasks(placement: Placement, stage: int, steps: int) -> list[MuonTask]:
    """The parameters of a stage that Muon updates, layer after layer.

    Args:
        placement: Placement of the model, at the run's layout.
        stage: Pipeline stage, from 0.
        steps: Number of Newton-Schulz iterations.
    """
    layout = placement.layout
    first = stage * layout.ranks_per_stage
    coords = [layout.coords_of(first + number) for number in range(layout.ranks_per_stage)]
    everyone = tuple(range(layout.ranks_per_stage))
    by_ep = {ep: tuple(number for number in everyone if coords[number].ep == ep) for ep in range(layout.ep)}
    tasks = []
    for parameter in placement.table.parameters:
        if not parameter.role.has_matrices or placement.stage_of(parameter) != stage:
            continue
        owner = coords[placement.owners(parameter)[0] - first]
        candidates = by_ep[owner.ep] if parameter.is_expert else everyone
        work = sum(flops(rows, columns, steps) for rows, columns in parameter.mapping.part_shapes)
        tasks.append(MuonTask(parameter, candidates, work))
    return tasks


def assign_rounds(tasks: Sequence[MuonTask], num_ranks: int, elements_per_rank: int) -> list[AssignedRound]:
    """Group neighbouring layers into rounds, and give each task of a round an owner.

    Within a round the most expensive task goes first, to the rank with the least work so far, this and the earlier rounds
    together. So the few large matrices of attention are spread first, and the experts fill what is left. The more ranks, the
    more layers a round has: in a round of one layer, most of many ranks would wait for the few that have attention's.

    Args:
        tasks: From `stage_tasks`.
        num_ranks: Ranks of the stage.
        elements_per_rank: A round ends at the end of a layer, once it has so many elements for the average rank.
    """
    loads = [0] * num_ranks
    return [_assign_owners(tuple(group), loads) for group in _whole_layers(tasks, elements_per_rank * num_ranks)]


def loads_of(rounds: Iterable[AssignedRound], num_ranks: int) -> list[int]:
    """FLOPs of each rank of the stage."""
    loads = [0] * num_ranks
    for each in rounds:
        for task, owner in zip(each.tasks, each.owners, strict=True):
            loads[owner] += task.flops
    return loads


def _whole_layers(tasks: Sequence[MuonTask], elements: int) -> Iterable[list[MuonTask]]:
    group: list[MuonTask] = []
    size = 0
    for task in tasks:
        if group and group[-1].parameter.layer != task.parameter.layer and size >= elements:
            yield group
            group, size = [], 0
        group.append(task)
        size += task.elements
    if group:
        yield group


def _assign_owners(tasks: tuple[MuonTask, ...], loads: list[int]) -> AssignedRound:
    """Adds to `loads` what each owner gets."""
    owners = [0] * len(tasks)
    for number in sorted(range(len(tasks)), key=lambda number: -tasks[number].flops):
        owners[number] = min(tasks[number].candidates, key=lambda rank: loads[rank])
        loads[owners[number]] += tasks[number].flops
    return AssignedRound(tasks, tuple(owners))
