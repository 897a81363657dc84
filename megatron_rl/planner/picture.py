"""Draws a plan: memory of each stage's fullest rank, term by term, and the timeline of a step with its bubble."""

from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.errors import check_output_file
from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.memory import rank_memory
from megatron_rl.planner.schedule import Span, timeline
from megatron_rl.planner.search import Scored, room
from megatron_rl.planner.workload import GIB, Workload

FORMATS = (".svg", ".png")
MOST_STAGES = 16
"""Most stages that the timeline shows."""
ROUNDS = 3
"""Microbatches drawn, as a multiple of the stages: warm-up and cool-down look the same however many are between."""


def check_format(file: Path) -> None:
    """Checks that a picture can be written.

    Args:
        file: The picture's file.

    Raises:
        ConfigError: The suffix is unknown.
        FileAccessError: The file cannot be written there.
    """
    if file.suffix not in FORMATS:
        raise ConfigError(f"--picture {file}: the suffix must be {' or '.join(FORMATS)}")
    check_output_file("--picture", file)


def draw(file: Path, counts: ParameterCounts, work: Workload, scored: Scored, machine: Machine) -> None:
    """Draws one layout to a file.

    Args:
        file: The picture; its suffix selects SVG or PNG.
        counts: Parameters of the model.
        work: The training step.
        scored: The layout with its time.
        machine: The machine.

    Raises:
        ConfigError: The suffix is unknown.
        FileAccessError: The file cannot be written there.
    """
    check_format(file)
    import matplotlib as mpl

    mpl.use("Agg")  # needs no display
    from matplotlib import pyplot as plt

    figure, (memory_axes, time_axes) = plt.subplots(2, 1, figsize=(12, 9), layout="constrained")
    _draw_memory(memory_axes, counts, work, scored, machine)
    _draw_timeline(time_axes, scored)
    figure.suptitle(
        f"{scored.candidate.layout.world_size} ranks, {scored.candidate.describe()}, recompute {scored.candidate.recompute}"
    )
    figure.savefig(file)
    plt.close(figure)


def _draw_memory(axes: Any, counts: ParameterCounts, work: Workload, scored: Scored, machine: Machine) -> None:
    stages = range(scored.candidate.layout.pp)
    memories = [rank_memory(counts, work, scored.candidate, machine, stage).terms for stage in stages]
    bottom = [0.0] * len(memories)
    for number, term in enumerate(memories[0]):
        sizes = [terms[term] / GIB for terms in memories]
        if max(sizes) > 0.01:
            axes.bar(stages, sizes, bottom=bottom, label=term, color=f"C{number % 10}", hatch="//" if number >= 10 else None)
            bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axes.axhline(room(machine) / GIB, color="black", linestyle="--", label="room")
    axes.set(xlabel="pipeline stage", ylabel="GiB on its fullest rank", title="memory", xticks=list(stages))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_timeline(axes: Any, scored: Scored) -> None:
    layout, time = scored.candidate.layout, scored.time
    drawn = max(1, min(time.microbatches, ROUNDS * layout.pp))
    spans = timeline(
        layout.pp,
        layout.vpp,
        drawn,
        lambda stage, _: time.stages[stage].forward.total / layout.vpp,
        lambda stage, _: time.stages[stage].backward.total / layout.vpp,
        time.send_s,
    )
    for span in (span for span in spans if span.stage < MOST_STAGES):
        axes.barh(
            span.stage, span.end - span.begin, left=span.begin, color=_colour(span, layout.vpp), edgecolor="white", linewidth=0.3
        )
    idle = bubble_of(spans, layout.pp)
    axes.set(
        xlabel=f"seconds; {drawn} of {time.microbatches} microbatches, forward in blue, backward in orange, chunks in shades",
        ylabel="stage",
        title=f"pipeline schedule: bubble {idle:.0%} of what is shown, {time.bubble_share:.0%} of a full step",
    )
    axes.invert_yaxis()


def bubble_of(spans: list[Span], pp: int) -> float:
    """Fraction of all stages' time, from the first pass to the last, in which a stage is idle."""
    end = max(span.end for span in spans)
    return 1 - sum(span.end - span.begin for span in spans) / (pp * end)


def _colour(span: Span, vpp: int) -> tuple[float, float, float]:
    light = 0.45 * span.what.chunk / vpp
    base = (1.0, 0.5, 0.05) if span.what.backward else (0.12, 0.47, 0.71)
    red, green, blue = (part + (1 - part) * light for part in base)
    return red, green, blue
