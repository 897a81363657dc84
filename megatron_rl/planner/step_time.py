"""Seconds of one training step on a layout, by kind of work."""

import math
from dataclasses import dataclass

from megatron_rl.planner.activations import tokens_per_rank
from megatron_rl.planner.collectives import Group, ring_seconds, send_seconds
from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.layer_time import BACKWARD, LayerSeconds, Seconds, layer_seconds
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.optimizers import OPTIMIZERS
from megatron_rl.planner.schedule import pipeline_seconds
from megatron_rl.planner.workload import Candidate, Workload


@dataclass(frozen=True)
class StagePass:
    """Seconds of one microbatch through all layers of a stage."""

    forward: Seconds
    backward: Seconds

    @property
    def total(self) -> float:
        """Sum of both passes."""
        return self.forward.total + self.backward.total


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one step."""

    parts: dict[str, float]
    """Seconds by kind of work, on the slowest stage."""
    stages: tuple[StagePass, ...]
    """One microbatch on each stage."""
    microbatches: int
    """Microbatches of each data-parallel rank in one optimizer step."""
    send_s: float
    """Seconds to send one microbatch's activations to the next stage."""

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def bubble_share(self) -> float:
        """Fraction of the forward and backward passes that is bubble; scoring passes are not counted."""
        slowest = max(stage.total for stage in self.stages) * self.microbatches
        return self.parts["bubble"] / (slowest + self.parts["bubble"]) if slowest else 0.0

    def limit(self) -> str:
        """The kind of work that takes most, with its percentage."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return f"{name} {self.parts[name] / self.total:.0%}"


def step_time(
    counts: ParameterCounts,
    work: Workload,
    candidate: Candidate,
    machine: Machine,
    *,
    precision: str = "bf16",
    overlaps_reduction: bool = False,
) -> StepTime:
    """Predicts one training step.

    Args:
        counts: Parameters of the model.
        work: The training step.
        candidate: The layout and its microbatches.
        machine: The machine.
        precision: Precision of the linear layers: bf16, fp8 or nvfp4.
        overlaps_reduction: Whether gradients are reduced while the backward passes run. This program's engine reduces them
            after the passes; published runs of other programs overlap.

    Returns:
        The seconds by kind of work.

    Raises:
        LayoutError: The layout cannot shard a parameter.
    """
    layout, tokens, count = candidate.layout, candidate.mean_microbatch(work), candidate.microbatches(work)
    shared = _oversubscription(machine, layout.world_size)
    stages = stage_passes(counts, work, candidate, machine, tokens, precision)
    send = _send_seconds(counts, work, candidate, machine, tokens)
    busy = [stage.total for stage in stages]
    slowest = stages[busy.index(max(busy))]
    passes = pipeline_seconds(busy, layout.vpp, count, send)
    forward = pipeline_seconds([stage.forward.total for stage in stages], layout.vpp, count, send / 2)
    work_of_slowest = slowest.forward + slowest.backward
    parts = {name: count * seconds for name, seconds in zip(_PART_NAMES, work_of_slowest.parts, strict=True)}
    parts["bubble"] = passes - sum(parts.values())
    parts["waiting for others"] = passes * work.unevenness * math.sqrt(2 * math.log(_synchronised_ranks(candidate)))
    parts["scoring"] = work.scoring_passes * forward / work.updates
    parts["gradients and weights over DP"] = (
        0.0 if overlaps_reduction else _data_parallel_seconds(counts, work, candidate, machine)
    )
    parts["optimizer"] = OPTIMIZERS[work.optimizer].update_seconds(counts, work, candidate, machine)
    parts["step"] = machine.step_overhead_s
    scale = work.updates
    return StepTime({name: value * scale * shared for name, value in parts.items()}, stages, count, send)


_PART_NAMES = ("matrix products", "attention", "memory and kernels", "tensor parallel", "expert exchange", "context parallel")


def _synchronised_ranks(candidate: Candidate) -> int:
    """Number of ranks that wait for one another in every microbatch, with different tokens or at different times.

    These are the stages of a pipeline, and the ranks of an expert-parallel group beyond those that share a sequence. The slowest
    of n ranks is sqrt(2 log n) standard deviations late.
    """
    layout = candidate.layout
    return layout.pp * max(1, layout.ep * layout.etp // (layout.tp * layout.cp))


def _oversubscription(machine: Machine, world_size: int) -> float:
    """Factor by which CPU ranks slow one another when they share cores."""
    return max(1.0, world_size / machine.cores) if machine.cores else 1.0


def stage_passes(
    counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine, tokens: float, precision: str = "bf16"
) -> tuple[StagePass, ...]:
    """Predicts one microbatch on each stage; the last stage includes the output layer.

    Args:
        counts: Parameters of the model.
        work: The training step.
        candidate: The layout.
        machine: The machine.
        tokens: Tokens of the microbatch, over all context-parallel ranks.
        precision: Precision of the linear layers: bf16, fp8 or nvfp4.

    Returns:
        Forward and backward pass of each stage.
    """
    model, layout = counts.architecture, candidate.layout
    sparse_layers = set(model.moe_layers)
    kinds: dict[bool, LayerSeconds] = {
        sparse: layer_seconds(model, work, candidate, machine, tokens, sparse=sparse, precision=precision)
        for sparse in ((True, False) if sparse_layers else (False,))
    }
    backward = {sparse: kind.backward(candidate.recompute, sparse=sparse) for sparse, kind in kinds.items()}
    passes = []
    for stage in range(layout.pp):
        own = layout.layers_of_stage(model.num_layers, stage)
        numbers = {True: len(sparse_layers.intersection(own))}
        numbers[False] = len(own) - numbers[True]
        forward_s, backward_s = Seconds(), Seconds()
        for sparse, number in numbers.items():
            if number:
                forward_s, backward_s = (
                    forward_s + kinds[sparse].forward.times(number),
                    backward_s + backward[sparse].times(number),
                )
        if stage == layout.pp - 1:
            head = _head_seconds(counts, work, candidate, machine, tokens)
            forward_s, backward_s = forward_s + head, backward_s + head.times(BACKWARD)
        passes.append(StagePass(forward_s, backward_s))
    return tuple(passes)


def _head_seconds(counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine, tokens: float) -> Seconds:
    """The output layer: only the rows of kept ids, which is bound by memory bandwidth, or all rows of the vocabulary."""
    model, layout, p = counts.architecture, candidate.layout, work.parameter_bytes
    local = tokens / layout.cp
    loss_tokens = local * work.loss_share
    gather = ring_seconds(machine, Group(layout.tp, 1), p * model.hidden_size * local) if candidate.sp > 1 else 0.0
    if not work.truncated:
        flops = 2.0 * loss_tokens * model.hidden_size * model.vocab_size / layout.tp
        return Seconds(matmul=flops / (machine.bf16_tflops * 1e12 * machine.matmul_efficiency), tp=gather)
    rows = loss_tokens * (1 - work.singletons) * work.mean_keep_set / layout.tp
    return Seconds(
        elementwise=rows * model.hidden_size * (p + 4) / (machine.hbm_gb_s * 1e9 * machine.memory_efficiency), tp=gather
    )


def _send_seconds(counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine, tokens: float) -> float:
    if candidate.layout.pp == 1:
        return 0.0
    size = work.parameter_bytes * counts.architecture.hidden_size * tokens_per_rank(candidate, tokens)
    return send_seconds(machine, candidate.layout.ranks_per_stage, size)


def _data_parallel_seconds(counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of new weights, on the stage that takes longest."""
    layout = candidate.layout
    dense_group = Group(layout.dp * layout.cp, layout.tp)
    expert_group = Group(layout.edp, layout.etp * layout.ep)
    seconds = []
    for stage in range(layout.pp):
        dense, expert = (size * (4 + work.parameter_bytes) for size in counts.buffer_sizes(layout, stage))
        seconds.append(ring_seconds(machine, dense_group, dense) + ring_seconds(machine, expert_group, expert))
    return max(seconds)
