"""Megatron's pipeline schedules as lists of passes, and when each pass runs: 1F1B, interleaved if a stage has several chunks."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one microbatch through one chunk of a stage."""

    backward: bool
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Span:
    """One pass with its begin and end, in seconds from the start of the step."""

    stage: int
    what: Pass
    begin: float
    end: float


def order_of(stage: int, pp: int, vpp: int, microbatches: int) -> list[Pass]:
    """The order in which one stage runs its passes.

    Args:
        stage: Index of the pipeline stage.
        pp: Pipeline stages.
        vpp: Virtual chunks of a stage.
        microbatches: Microbatches of the step.

    Returns:
        The passes, first to last.
    """
    total = microbatches * vpp
    warm_up = min(total, pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp)
    if vpp > 1 and microbatches == pp:
        warm_up = total  # Megatron runs all forward passes first if there is only one round
    forward = [_place(number, pp, vpp, backward=False) for number in range(total)]
    backward = [_place(number, pp, vpp, backward=True) for number in range(total)]
    steady = [step for pair in zip(forward[warm_up:], backward, strict=False) for step in pair]
    return forward[:warm_up] + steady + backward[total - warm_up :]


def _place(number: int, pp: int, vpp: int, *, backward: bool) -> Pass:
    """The number-th pass: rounds of pp microbatches through each chunk in turn, backward from the last chunk."""
    round_, within = divmod(number, pp * vpp)
    chunk, offset = divmod(within, pp)
    return Pass(backward, round_ * pp + offset, vpp - 1 - chunk if backward else chunk)


def timeline(
    pp: int,
    vpp: int,
    microbatches: int,
    forward_s: Callable[[int, int], float],
    backward_s: Callable[[int, int], float],
    send_s: float,
) -> list[Span]:
    """Simulates the schedule: each pass starts when its stage is free and its input has arrived.

    Args:
        pp: Pipeline stages.
        vpp: Virtual chunks of a stage.
        microbatches: Microbatches of the step.
        forward_s: Seconds of a forward pass, called as forward_s(stage, chunk).
        backward_s: Seconds of a backward pass, called in the same way.
        send_s: Seconds to send activations or gradients between neighbouring stages.

    Returns:
        All passes of all stages with begin and end.
    """
    queues = [order_of(stage, pp, vpp, microbatches)[::-1] for stage in range(pp)]
    free = [0.0] * pp
    done: dict[tuple[int, Pass], float] = {}
    spans: list[Span] = []
    while any(queues):
        progress = False
        for stage, queue in enumerate(queues):
            while queue and (ready := _ready(done, stage, queue[-1], pp, vpp, send_s)) is not None:
                what = queue.pop()
                begin = max(free[stage], ready)
                free[stage] = begin + (backward_s if what.backward else forward_s)(stage, what.chunk)
                done[stage, what] = free[stage]
                spans.append(Span(stage, what, begin, free[stage]))
                progress = True
        assert progress, f"a schedule of {pp} stages, {vpp} chunks and {microbatches} microbatches deadlocks"
    return spans


def _ready(done: dict[tuple[int, Pass], float], stage: int, what: Pass, pp: int, vpp: int, send_s: float) -> float | None:
    """Time at which the input of a pass arrives; None if it is not known yet."""
    position = what.chunk * pp + stage  # in the order of the layers
    if what.backward and position == pp * vpp - 1:
        return done.get((stage, Pass(False, what.microbatch, what.chunk)))
    before = position + 1 if what.backward else position - 1
    if before < 0:
        return 0.0
    at = done.get((before % pp, Pass(what.backward, what.microbatch, before // pp)))
    return None if at is None else at + send_s


def pipeline_seconds(stage_s: list[float], vpp: int, microbatches: int, send_s: float) -> float:
    """Seconds of a schedule without simulating it: the slowest stage's work, and the others' part in warm-up and cool-down.

    Args:
        stage_s: For each stage, seconds of the forward and backward pass of one microbatch through all of its chunks.
        vpp: Virtual chunks of a stage.
        microbatches: Microbatches of the step.
        send_s: Seconds to send activations or gradients between neighbouring stages.

    Returns:
        Seconds from the first pass to the last.
    """
    slowest = max(stage_s)
    return microbatches * slowest + (sum(stage_s) - slowest) / vpp + 2 * (len(stage_s) - 1) * send_s
