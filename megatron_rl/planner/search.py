"""The best layouts of a number of trainer ranks, and what is missing where none fits."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.layouts import candidate_layouts
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
        """Seconds of one step."""
        return self.time.total


@dataclass(frozen=True)
class Searched:
    """The best first; and of those that do not fit, the one that lacks least."""

    best: list[Scored]
    num_evaluated: int
    nearest: tuple[Candidate, Memory] | None


class _Fastest:
    """The `keep` fastest of what was added; of equals the earlier ones."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._heap: list[tuple[float, int, Candidate, StepTime]] = []
        self._added = 0

    def takes(self, seconds: float) -> bool:
        return len(self._heap) < self._keep or seconds < -self._heap[0][0]

    def add(self, candidate: Candidate, time: StepTime) -> None:
        self._added += 1
        entry = (-time.total, -self._added, candidate, time)
        heapq.heappush(self._heap, entry) if len(self._heap) < self._keep else heapq.heappushpop(self._heap, entry)

    def in_order(self) -> list[tuple[Candidate, StepTime]]:
        return [entry[2:] for entry in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def search(counts: ParameterCounts, work: Workload, machine: Machine, world_size: int, node: int, *, keep: int = 5) -> Searched:
    """The `keep` fastest of all layouts that divide the model and fit into memory. Of recomputation the least that fits.

    Memory is looked at only where a layout would be among the fastest without recomputation: with it, it is slower still.
    """
    fastest, num_evaluated = _Fastest(keep), 0
    nearest: tuple[float, Candidate] | None = None
    for layout in candidate_layouts(counts.architecture, world_size, node, work.longest_sequence):
        leanest = Candidate(layout, work.longest_sequence, "full")
        missing = _static_missing(counts, work, machine, leanest)
        num_evaluated += missing is None or missing > 0
        for candidate in _of_each_length(work, layout) if missing == 0 else ():
            num_evaluated += 1
            time = step_time(counts, work, candidate, machine)
            if not fastest.takes(time.total):
                continue
            leanest, missing = _least_recomputed(counts, work, machine, candidate)
            if missing > 0:
                break  # longer microbatches lack more
            time = time if leanest is candidate else step_time(counts, work, leanest, machine)
            if fastest.takes(time.total):
                fastest.add(leanest, time)
        if missing and (nearest is None or missing < nearest[0]):
            nearest = missing, leanest
    best = [Scored(c, time, most_loaded(counts, work, c, machine)) for c, time in fastest.in_order()]
    lacking = (nearest[1], most_loaded(counts, work, nearest[1], machine)) if nearest and not best else None
    return Searched(best, num_evaluated, lacking)


def _static_missing(counts: ParameterCounts, work: Workload, machine: Machine, candidate: Candidate) -> float | None:
    """Bytes that weights, gradients and optimizer state alone have too much; None: the layout does not cut the model."""
    try:
        static = max(sum(static_terms(counts, work, candidate, stage).values()) for stage in _ends(candidate.layout))
    except LayoutError:
        return None
    return max(0.0, static + machine.reserved_gib * GIB - room(machine))


def _of_each_length(work: Workload, layout: Layout) -> Iterator[Candidate]:
    """Without recomputation, the shortest microbatches first."""
    for number in MICROBATCHES_OF:
        tokens = number * work.longest_sequence
        if number > 1 and tokens * layout.dp > work.tokens / work.updates:
            return  # some ranks would have nothing to do
        yield Candidate(layout, tokens, "none")


def _least_recomputed(counts: ParameterCounts, work: Workload, machine: Machine, candidate: Candidate) -> tuple[Candidate, float]:
    """The candidate with the first recomputation that fits, and 0.

    With the last one and the bytes that it lacks where none does.
    """
    for recompute in RECOMPUTE:
        tried = candidate if recompute == candidate.recompute else replace(candidate, recompute=recompute)
        total = max(rank_memory(counts, work, tried, machine, stage).total for stage in _ends(candidate.layout))
        if total <= room(machine):
            return tried, 0.0
    return tried, total - room(machine)


def room(machine: Machine) -> float:
    """Bytes that a plan may fill: the last part is kept free for what the model of memory does not know."""
    return machine.memory_gib * GIB * (1 - HEADROOM)


def _ends(layout: Layout) -> set[int]:
    """Stages among which the fullest is.

    The first ones, which keep most microbatches, and the last, which has the output layer.
    """
    return {stage for stage in (0, 1, 2, layout.pp - 1) if 0 <= stage < layout.pp}


def evaluate_candidate(counts: ParameterCounts, work: Workload, machine: Machine, candidate: Candidate) -> Scored:
    """Of a named layout, whether it fits or not; LayoutError where it does not divide the model."""
    model = counts.architecture
    candidate.layout.check_model(
        num_layers=model.num_layers,
        num_heads=model.attention.num_heads,
        num_query_groups=model.attention.num_query_groups,
        hidden_size=model.hidden_size,
        num_experts=model.moe.num_experts if model.moe else None,
    )
    return Scored(candidate, step_time(counts, work, candidate, machine), most_loaded(counts, work, candidate, machine))


def smallest_fitting_search(
    counts: ParameterCounts, work: Workload, machine: Machine, world_size: int, node: int, most: int = 16384
) -> Searched | None:
    """The smallest doubling of the ranks at which something fits."""
    while (world_size := 2 * world_size) <= most:
        searched = search(counts, work, machine, world_size, node, keep=1)
        if searched.best:
            return searched
    return None
