"""Who orthogonalises what, and in which order: a pure function of sizes, the same on every rank.

The ranks of a pipeline stage hold the stage's matrices in pieces (tensor parallelism cuts matrices, the distributed optimizer cuts
what is left over the data-parallel ranks). For each parameter one rank, its owner, brings the pieces together, orthogonalises its
logical matrices and sends the pieces of the update back. This goes in rounds of whole layers, so that the exchange of one round runs
beside the work of another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.optim.newton_schulz import flops
from megatron_rl.weight_mapping import Parameter, Placement


@dataclass(frozen=True)
class Task:
    """One parameter of the stage: all logical matrices in it have the same owner."""

    parameter: Parameter
    sharers: tuple[int, ...]
    """Ranks within the stage that hold a piece of it: one of them becomes its owner."""
    flops: int

    @property
    def elements(self) -> int:
        return sum(rows * columns for rows, columns in self.parameter.mapping.part_shapes)


@dataclass(frozen=True)
class Round:
    """Whole layers, exchanged and orthogonalised together."""

    tasks: tuple[Task, ...]
    owners: tuple[int, ...]
    """Of each task, a rank within the stage."""


def stage_tasks(placement: Placement, stage: int, steps: int) -> list[Task]:
    """Muon's share of the parameters of a stage, layer after layer. steps: of Newton-Schulz."""
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
        sharers = by_ep[owner.ep] if parameter.is_expert else everyone
        work = sum(flops(*shape, steps) for shape in parameter.mapping.part_shapes)
        tasks.append(Task(parameter, sharers, work))
    return tasks


def assign_rounds(tasks: Sequence[Task], num_ranks: int, elements_per_rank: int) -> list[Round]:
    """Rounds of neighbouring layers that reach `elements_per_rank` on the average rank, each shared out by cost: the most expensive task
    first, to the rank with the least work so far, this and the earlier rounds together. So the few large matrices of attention are spread
    first, and the experts fill what is left.

    The more ranks, the more layers a round has: in a round of one layer, most of many ranks would wait for the few that have attention's.
    """
    loads = [0] * num_ranks
    return [_share_out(tuple(group), loads) for group in _whole_layers(tasks, elements_per_rank * num_ranks)]


def loads_of(rounds: Iterable[Round], num_ranks: int) -> list[int]:
    """FLOPs of each rank of the stage."""
    loads = [0] * num_ranks
    for each in rounds:
        for task, owner in zip(each.tasks, each.owners, strict=True):
            loads[owner] += task.flops
    return loads


def _whole_layers(tasks: Sequence[Task], elements: int) -> Iterable[list[Task]]:
    group: list[Task] = []
    size = 0
    for task in tasks:
        if group and group[-1].parameter.layer != task.parameter.layer and size >= elements:
            yield group
            group, size = [], 0
        group.append(task)
        size += task.elements
    if group:
        yield group


def _share_out(tasks: tuple[Task, ...], loads: list[int]) -> Round:
    """Raises `loads` by what it gives out."""
    owners = [0] * len(tasks)
    for number in sorted(range(len(tasks)), key=lambda number: -tasks[number].flops):
        owners[number] = min(tasks[number].sharers, key=lambda rank: loads[rank])
        loads[owners[number]] += tasks[number].flops
    return Round(tasks, tuple(owners))
