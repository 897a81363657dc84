"""Searches the fastest layouts of a number of trainer ranks, and what memory is missing if none fits."""

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
"""Sizes of a microbatch that are tried, as multiples of the longest sequence."""
HEADROOM = 0.04
"""Fraction of the memory that a plan leaves free."""


@dataclass(frozen=True)
class Scored:
    """A layout with its predicted time and memory."""

    candidate: Candidate
    time: StepTime
    memory: Memory

    @property
    def seconds(self) -> float:
        """Seconds of one training step."""
        return self.time.total


@dataclass(frozen=True)
class Searched:
    """Result of a search."""

    best: list[Scored]
    """Layouts that fit, the fastest first."""
    num_evaluated: int
    nearest: tuple[Candidate, Memory] | None
    """If none fits: the layout that lacks the fewest bytes."""


class _Fastest:
    """The `keep` fastest of the candidates that were added; of equally fast ones the earlier."""

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
    """Searches the fastest of all layouts that divide the model and fit into memory, each with the least recomputation that fits.

    Memory is computed only if the layout would be among the fastest without recomputation, because recomputation makes it slower.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        world_size: Number of trainer ranks.
        node: Ranks of one node.
        keep: How many layouts to return.

    Returns:
        The fastest layouts, or the one that lacks the least memory.
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
    """Bytes by which weights, gradients and optimizer state alone exceed the memory; None if the model cannot be sharded so."""
    try:
        static = max(sum(static_terms(counts, work, candidate, stage).values()) for stage in _ends(candidate.layout))
    except LayoutError:
        return None
    return max(0.0, static + machine.reserved_gib * GIB - room(machine))


def _of_each_length(work: Workload, layout: Layout) -> Iterator[Candidate]:
    """Candidates without recomputation, the smallest microbatches first."""
    for number in MICROBATCHES_OF:
        tokens = number * work.longest_sequence
        if number > 1 and tokens * layout.dp > work.tokens / work.updates:
            return  # some ranks would have nothing to do
        yield Candidate(layout, tokens, "none")


def _least_recomputed(counts: ParameterCounts, work: Workload, machine: Machine, candidate: Candidate) -> tuple[Candidate, float]:
    """The candidate with the least recomputation that fits, and 0; else with full recomputation and the missing bytes."""
    for recompute in RECOMPUTE:
        tried = candidate if recompute == candidate.recompute else replace(candidate, recompute=recompute)
        total = max(rank_memory(counts, work, tried, machine, stage).total for stage in _ends(candidate.layout))
        if total <= room(machine):
            return tried, 0.0
    return tried, total - room(machine)


def room(machine: Machine) -> float:
    """Bytes that a plan may use; HEADROOM stays free for what the memory model does not count."""
    return machine.memory_gib * GIB * (1 - HEADROOM)


def _ends(layout: Layout) -> set[int]:
    """Stages among which the fullest is: the first ones keep most microbatches, the last one has the output layer."""
    return {stage for stage in (0, 1, 2, layout.pp - 1) if 0 <= stage < layout.pp}


def evaluate_candidate(counts: ParameterCounts, work: Workload, machine: Machine, candidate: Candidate) -> Scored:
    """Predicts time and memory of one named layout, whether it fits or not.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        candidate: The layout and its microbatches.

    Returns:
        The layout with its time and the memory of its fullest stage.

    Raises:
        LayoutError: The layout does not divide the model.
    """
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
    """Doubles the number of ranks until a layout fits.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        world_size: Number of trainer ranks at which nothing fits.
        node: Ranks of one node.
        most: Largest number of ranks to try.

    Returns:
        The search at the first number of ranks at which a layout fits; None if there is none up to `most`.
    """
    while (world_size := 2 * world_size) <= most:
        searched = search(counts, work, machine, world_size, node, keep=1)
        if searched.best:
            return searched
    return None
