"""Device memory of one rank, term by term, and its host memory."""

from dataclasses import dataclass

from megatron_rl.planner.activations import (
    LayerBytes,
    chunks_in_flight,
    expert_tokens,
    kept_bytes,
    layer_bytes,
    tokens_per_rank,
    workspace_bytes,
)
from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.optimizers import OPTIMIZERS
from megatron_rl.planner.rollouts import WEIGHT_BYTES
from megatron_rl.planner.workload import GIB, Candidate, Workload

CHUNK_BYTES = 16 << 20
"""Bytes of a chunk of logits, and of an fp32 chunk of the output weight, in the keep-set operation's dense path."""
PROCESS_BYTES = 6 * GIB
"""Host memory of a rank's process: libraries, pinned buffers of the driver."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of one rank."""

    stage: int
    """Pipeline stage of the rank."""
    terms: dict[str, float]
    """Bytes by purpose."""

    @property
    def total(self) -> float:
        """Sum of the terms in bytes."""
        return sum(self.terms.values())

    @property
    def gib(self) -> float:
        """Sum of the terms in GiB."""
        return self.total / GIB


def static_terms(counts: ParameterCounts, work: Workload, candidate: Candidate, stage: int) -> dict[str, float]:
    """Memory that stays allocated from the first step on: Megatron's parameter and gradient buffers, the optimizer's shard.

    Of the data-parallel ranks it is the fullest one, whose shard of the buffers has no padding.

    Args:
        counts: Parameters of the model.
        work: The training step.
        candidate: The layout.
        stage: Index of the pipeline stage.

    Returns:
        Bytes by purpose.

    Raises:
        LayoutError: The layout cannot shard a parameter.
    """
    layout = candidate.layout
    buffers, shard, matrices, matrix_shard, untrained = 0, 0.0, 0, 0.0, 0
    for chunk in range(layout.vpp):
        held = counts.chunk(layout, stage, chunk)
        dense, expert = held.buffer_sizes(layout)
        buffers += dense + expert
        shard += min(dense / (layout.dp * layout.cp), held.dense.trained + held.tied.trained) + min(
            expert / layout.edp, held.expert.trained
        )
        matrices += held.dense.matrices + held.expert.matrices
        matrix_shard += held.dense.matrices / (layout.dp * layout.cp) + held.expert.matrices / layout.edp
        untrained += held.dense.untrained + held.expert.untrained
    return {
        "parameters": work.parameter_bytes * buffers + 4.0 * untrained,
        "quantised weights": _bytes_per_quantised_element(work) * matrices,
        "gradients": 4.0 * buffers,
        "master weights": 0.0 if work.parameter_bytes == 4 else 4.0 * shard,
        "optimizer state": OPTIMIZERS[work.optimizer].state_bytes(shard, matrix_shard),
    }


def _bytes_per_quantised_element(work: Workload) -> float:
    """One fake-quantised copy of each matrix, which all microbatches in flight use; with products in FP4 its packed bytes."""
    if work.rollout_weights != "nvfp4":
        return 0.0
    return work.parameter_bytes + (WEIGHT_BYTES["nvfp4"] if work.keeps_packed_weights else 0.0)


def rank_memory(counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine, stage: int) -> Memory:
    """Peak memory of the busiest rank of a stage.

    Args:
        counts: Parameters of the model.
        work: The training step.
        candidate: The layout and its microbatches.
        machine: The machine.
        stage: Index of the pipeline stage.

    Returns:
        The memory by purpose.

    Raises:
        LayoutError: The layout cannot shard a parameter.
    """
    terms = static_terms(counts, work, candidate, stage)
    kept, workspace = _layers(counts, work, candidate, stage)
    factor = machine.activation_factor
    head = output_layer_bytes(counts, work, candidate)["keep-set" if work.truncated else "chunked"]
    head = head if stage == candidate.layout.pp - 1 else 0.0
    terms |= {
        "activations": factor * kept,
        # The output layer's backward pass ends before that of the layers begins.
        "workspace": max(0.0, factor * workspace - head),
        "output layer": head,
        "replayed routes": _route_bytes(counts, work, candidate, stage),
        "communication": _communication_bytes(counts, work, candidate),
    }
    working = sum(terms[name] for name in ("activations", "workspace", "output layer", "communication"))
    rest = {
        "update beyond that": max(0.0, _update_bytes(counts, work, candidate, stage) - working),
        "fragmentation": machine.fragmentation * working,
        "driver and libraries": machine.reserved_gib * GIB,
    }
    return Memory(stage, terms | rest)


def most_loaded(counts: ParameterCounts, work: Workload, candidate: Candidate, machine: Machine) -> Memory:
    """Peak memory of the stage that uses most.

    Args:
        counts: Parameters of the model.
        work: The training step.
        candidate: The layout and its microbatches.
        machine: The machine.

    Returns:
        The memory of that stage's busiest rank.

    Raises:
        LayoutError: The layout cannot shard a parameter.
    """
    return max(
        (rank_memory(counts, work, candidate, machine, s) for s in range(candidate.layout.pp)), key=lambda memory: memory.total
    )


def _layers(counts: ParameterCounts, work: Workload, candidate: Candidate, stage: int) -> tuple[float, float]:
    """Bytes that all chunks in flight keep, and the workspace of the one layer whose backward pass runs."""
    model, layout, tokens = counts.architecture, candidate.layout, candidate.microbatch_tokens
    sparse_layers = set(model.moe_layers)
    of_kind: dict[bool, LayerBytes] = {
        sparse: layer_bytes(model, work, candidate, tokens, sparse=sparse)
        for sparse in ((True, False) if sparse_layers else (False,))
    }
    in_flight = chunks_in_flight(layout.pp, layout.vpp, stage, candidate.microbatches(work))
    own = layout.layers_of_stage(model.num_layers, stage)
    kinds = [layer in sparse_layers for layer in own]
    kept = sum(kept_bytes(of_kind[sparse], candidate.recompute, sparse=sparse) for sparse in kinds)
    workspace = max(workspace_bytes(of_kind[sparse], candidate.recompute, sparse=sparse) for sparse in set(kinds))
    if stage == layout.pp - 1:
        kept += 2 * of_kind[kinds[-1]].stream / in_flight * layout.vpp  # input and output of the final norm, once
    return kept * in_flight / layout.vpp, workspace


def output_layer_bytes(counts: ParameterCounts, work: Workload, candidate: Candidate) -> dict[str, float]:
    """Memory of the output layer for one microbatch, for each of the three ways to compute it.

    Args:
        counts: Parameters of the model.
        work: The training step.
        candidate: The layout and its microbatches.

    Returns:
        Bytes by way. "dense": logits of every token in the model's dtype and in fp32, and their gradient, as in a plain
        vocabulary-parallel cross entropy. "chunked": the same numbers, one chunk of the vocabulary at a time. "keep-set": only
        the kept ids.
    """
    model, layout, p = counts.architecture, candidate.layout, work.parameter_bytes
    tokens = candidate.microbatch_tokens / layout.cp
    # The hidden states of all tokens, gathered under sequence parallelism, and their fp32 gradient before it is reduced.
    hidden = tokens * model.hidden_size * ((p if candidate.sp > 1 else 0) + 4)
    statistics = 6 * 4 * tokens
    rows = model.vocab_size / layout.tp
    chunk = min(CHUNK_BYTES, 4 * rows * tokens) + min(CHUNK_BYTES, 4 * rows * model.hidden_size)
    loss_tokens = tokens * work.loss_share
    pairs = loss_tokens * (1 - work.singletons) * work.mean_keep_set / layout.tp
    return {
        "dense": hidden + tokens * rows * (p + 4 + 4),
        "chunked": hidden + statistics + 2 * chunk,
        "keep-set": hidden + statistics + pairs * (4 + 4 + 8 + 4) + chunk,
    }


def _route_bytes(counts: ParameterCounts, work: Workload, candidate: Candidate, stage: int) -> float:
    """Recorded experts of all microbatches for this stage's layers, int64: they are prepared before the first one runs."""
    model, layout = counts.architecture, candidate.layout
    if model.moe is None or not work.replays_routes:
        return 0.0
    sparse = set(model.moe_layers).intersection(layout.layers_of_stage(model.num_layers, stage))
    tokens = candidate.microbatches(work) * tokens_per_rank(candidate, candidate.microbatch_tokens)
    return tokens * len(sparse) * model.moe.top_k * 8


def _communication_bytes(counts: ParameterCounts, work: Workload, candidate: Candidate) -> float:
    """Gathered input of a linear layer, rows sent to and from other experts, inputs and outputs of a stage."""
    model, layout, p, tokens = counts.architecture, candidate.layout, work.parameter_bytes, candidate.microbatch_tokens
    row = p * model.hidden_size
    gathered = row * tokens / layout.cp if candidate.sp > 1 else 0.0
    sent = 2 * row * expert_tokens(model, candidate, tokens, work.imbalance) if model.moe and layout.ep * layout.etp > 1 else 0.0
    between_stages = 2 * row * tokens_per_rank(candidate, tokens) if layout.pp > 1 else 0.0
    ring = 4 * p * _kv_width(counts) * tokens / layout.cp / layout.tp if layout.cp > 1 else 0.0
    return max(gathered, sent, ring) + between_stages


def _kv_width(counts: ParameterCounts) -> float:
    a = counts.architecture.attention
    return 2 * a.num_query_groups * (a.head_dim if hasattr(a, "head_dim") else a.q_head_dim)


def _update_bytes(counts: ParameterCounts, work: Workload, candidate: Candidate, stage: int) -> float:
    """Peak outside the passes: the optimizer's update, or the buckets of a weight update and one gathered tensor."""
    held = [counts.chunk(candidate.layout, stage, chunk) for chunk in range(candidate.layout.vpp)]
    largest_dense = max(max(part.dense.largest, part.tied.largest) for part in held) * candidate.layout.tp
    largest_expert = max(part.expert.largest for part in held) * candidate.layout.etp
    sync = 2.0 * work.bucket_bytes + work.parameter_bytes * max(largest_dense, largest_expert)
    num_layers = len(candidate.layout.layers_of_stage(counts.architecture.num_layers, stage))
    largest = max(largest_dense, largest_expert)
    return max(sync, OPTIMIZERS[work.optimizer].update_bytes(work, candidate, held, largest, num_layers))


def host_bytes(counts: ParameterCounts, work: Workload, candidate: Candidate) -> float:
    """Host memory of one rank: its process, the step's payload, a checkpoint that is being written, the reference's weights.

    Args:
        counts: Parameters of the model.
        work: The training step.
        candidate: The layout and its microbatches.

    Returns:
        The bytes.
    """
    model, layout = counts.architecture, candidate.layout
    stages = range(layout.pp)
    static = max((static_terms(counts, work, candidate, stage) for stage in stages), key=lambda terms: sum(terms.values()))
    tokens = candidate.microbatches(work) * candidate.microbatch_tokens
    moe = model.moe
    layers = (
        max(len(set(model.moe_layers).intersection(layout.layers_of_stage(model.num_layers, s))) for s in stages) if moe else 0
    )
    routes = layers * moe.top_k * (1 if moe.num_experts < 256 else 2) if moe and work.replays_routes else 0
    keep_sets = work.loss_share * (work.singletons + (1 - work.singletons) * work.mean_keep_set) * 4
    payload = 2 * tokens * (70 + routes + keep_sets)  # the microbatches and the rollouts that they are made of
    checkpoint = static["master weights"] + static["optimizer state"] + static["parameters"] / max(1, layout.dp)
    reference = static["parameters"] if work.keeps_reference else 0.0
    return PROCESS_BYTES + payload + checkpoint + reference
