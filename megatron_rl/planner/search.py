"""The best layouts of a number of trainer ranks, and what is missing where none fits."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.layouts import layouts_of
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.memory import Memory, most_loaded, rank_memory, static_terms
from megatron_rl.planner.step_time import StepTime, step_time
from megatron_rl.planner.workload import GIB, RECOMPUTE, Candidate, Workload
from megatron_rl.topology import Layout, LayoutError

MICROBATCHES_OF = (1, 2, 4)
"""Lengths of a microbatch that are tried, in longest sequences."""
HEADROOM = 0.04
"""Share of the memory that a plan leaves free."""


@dataclass(frozen=True)
class Scored:
    """A layout that fits."""

    candidate: Candidate
    time: StepTime
    memory: Memory

    @property
    def seconds(self) -> float:
        return self.time.total


@dataclass(frozen=True)
class Searched:
    """The best first; and of those that do not fit, the one that lacks least."""

    best: list[Scored]
    looked_at: int
    nearest: tuple[Candidate, Memory] | None


def search(counts: ParameterCounts, work: Workload, machine: Machine, world_size: int, node: int, *, keep: int = 5) -> Searched:
    """The `keep` fastest of all layouts that divide the model and fit into memory. Of recomputation the least that fits."""
    found: list[tuple[float, int, Candidate, StepTime]] = []
    nearest: tuple[float, Candidate] | None = None
    looked_at = 0
    for layout in layouts_of(counts.architecture, world_size, node, work.longest_sequence):
        for candidate, missing in _fitting(counts, work, machine, layout):
            looked_at += 1
            if missing > 0:
                nearest = min(nearest or (missing, candidate), (missing, candidate), key=lambda pair: pair[0])
                continue
            time = step_time(counts, work, candidate, machine)
            entry = (-time.total, -looked_at, candidate, time)
            heapq.heappush(found, entry) if len(found) < keep else heapq.heappushpop(found, entry)
    best = [
        Scored(c, time, most_loaded(counts, work, c, machine))
        for _, _, c, time in sorted(found, key=lambda entry: entry[:2], reverse=True)
    ]
    lacking = (nearest[1], most_loaded(counts, work, nearest[1], machine)) if nearest and not best else None
    return Searched(best, looked_at, lacking)


def _fitting(counts: ParameterCounts, work: Workload, machine: Machine, layout: Layout) -> Iterator[tuple[Candidate, float]]:
    """Candidates of one layout with the bytes that they lack (0: they fit): of each microbatch length the first recomputation that fits."""
    capacity = room(machine)
    leanest = Candidate(layout, work.longest_sequence, "full")
    try:
        static = max(sum(static_terms(counts, work, leanest, stage).values()) for stage in _ends(layout))
    except LayoutError:
        return
    if static + machine.reserved_gib * GIB > capacity:
        yield leanest, static + machine.reserved_gib * GIB - capacity
        return
    for number in MICROBATCHES_OF:
        tokens = number * work.longest_sequence
        if number > 1 and tokens * layout.dp > work.tokens / work.updates:
            return  # some ranks would have nothing to do
        for recompute in RECOMPUTE:
            candidate = Candidate(layout, tokens, recompute)
            missing = max(0.0, max(rank_memory(counts, work, candidate, machine, s).total for s in _ends(layout)) - capacity)
            if missing == 0:
                yield candidate, 0.0
                break
        else:
            yield candidate, missing
            return


def room(machine: Machine) -> float:
    """Bytes that a plan may fill: the last part is kept free for what the model of memory does not know."""
    return machine.memory_gib * GIB * (1 - HEADROOM)


def _ends(layout: Layout) -> set[int]:
    """Stages among which the fullest is: the first ones, which keep most microbatches, and the last, which has the output layer."""
    return {stage for stage in (0, 1, 2, layout.pp - 1) if 0 <= stage < layout.pp}


def verdict(counts: ParameterCounts, work: Workload, machine: Machine, candidate: Candidate) -> Scored:
    """Of a named layout, whether it fits or not; LayoutError where it does not divide the model."""
    model = counts.architecture
    candidate.layout.check_model(
        num_layers=model.num_layers, num_heads=model.attention.num_heads, num_query_groups=model.attention.num_query_groups,
        hidden_size=model.hidden_size, num_experts=model.moe.num_experts if model.moe else None,
    )  # fmt: skip
    return Scored(candidate, step_time(counts, work, candidate, machine), most_loaded(counts, work, candidate, machine))


def enough_ranks(
    counts: ParameterCounts, work: Workload, machine: Machine, world_size: int, node: int, most: int = 16384
) -> Searched | None:
    """The smallest doubling of the ranks at which something fits."""
    while (world_size := 2 * world_size) <= most:
        searched = search(counts, work, machine, world_size, node, keep=1)
        if searched.best:
            return searched
    return None
