"""Seconds of one training step on a layout, by what they are spent on."""

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
    """One microbatch through all layers of a stage."""

    forward: Seconds
    backward: Seconds

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward.total + self.backward.total


@dataclass(frozen=True)
class StepTime:
    """Of one step; the parts sum up to the total."""

    parts: dict[str, float]
    stages: tuple[StagePass, ...]
    microbatches: int
    send_s: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def bubble_share(self) -> float:
        """Of the passes with gradient."""
        slowest = max(stage.total for stage in self.stages) * self.microbatches
        return self.parts["bubble"] / (slowest + self.parts["bubble"]) if slowest else 0.0

    def limit(self) -> str:
        """What takes most."""
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
    """overlaps_reduction: gradients are reduced while the backward passes run; this program's engine does it afterwards."""
    layout, tokens, count = candidate.layout, candidate.mean_microbatch(work), candidate.microbatches(work)
    shared = _oversubscription(machine, layout.world_size)
    stages = stage_passes(counts, work, candidate, machine, tokens, precision)
    send = _send_seconds(counts, work, candidate, machine, tokens)
    busy = [stage.total for stage in stages]
    slowest = stages[busy.index(max(busy))]
    whole = pipeline_seconds(busy, layout.vpp, count, send)
    forward = pipeline_seconds([stage.forward.total for stage in stages], layout.vpp, count, send / 2)
    work_of_slowest = slowest.forward + slowest.backward
    parts = {name: count * seconds for name, seconds in zip(_PART_NAMES, work_of_slowest.parts, strict=True)}
    parts["bubble"] = whole - sum(parts.values())
    parts["waiting for others"] = whole * work.unevenness * math.sqrt(2 * math.log(_ranks_that_meet(candidate)))
    parts["scoring"] = work.scoring_passes * forward / work.updates
    parts["gradients and weights over DP"] = (
        0.0 if overlaps_reduction else _data_parallel_seconds(counts, work, candidate, machine)
    )
    parts["optimizer"] = OPTIMIZERS[work.optimizer].update_seconds(counts, work, candidate, machine)
    parts["step"] = machine.step_overhead_s
    scale = work.updates
    return StepTime({name: value * scale * shared for name, value in parts.items()}, stages, count, send)


_PART_NAMES = ("matrix products", "attention", "memory and kernels", "tensor parallel", "expert exchange", "context parallel")


def _ranks_that_meet(candidate: Candidate) -> int:
    """Those that wait for one another in every microbatch, with different tokens or at different times.

    Stages of a pipeline, and the ranks of an expert-parallel group beyond those that share a sequence. The slowest of n is
    sqrt(2 log n) standard deviations late.
    """
    layout = candidate.layout
    return layout.pp * max(1, layout.ep * layout.etp // (layout.tp * layout.cp))


def _oversubscription(machine: Machine, world_size: int) -> float:
    """CPU ranks share the cores."""
    return max(1.0, world_size / machine.cores) if machine.cores else 1.0


def stage_passes(
    counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine, tokens: float, precision: str = "bf16"
) -> tuple[StagePass, ...]:
    """Of each stage; the last one's hold the output layer."""
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
    """The output layer: rows of the kept ids alone, which is bound by memory, or all rows of the vocabulary."""
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
    """Gradients reduce-scattered in fp32, new weights gathered: of the stage that holds most."""
    layout = candidate.layout
    dense_group = Group(layout.dp * layout.cp, layout.tp)
    expert_group = Group(layout.edp, layout.etp * layout.ep)
    seconds = []
    for stage in range(layout.pp):
        dense, expert = (size * (4 + work.parameter_bytes) for size in counts.buffer_sizes(layout, stage))
        seconds.append(ring_seconds(machine, dense_group, dense) + ring_seconds(machine, expert_group, expert))
    return max(seconds)
