"""Predicts the inference servers: what fits into their memory, their tokens per second, and the seconds of a weight update."""

from dataclasses import dataclass

from megatron_rl.planner.collectives import Group, ring_seconds
from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.layer_time import core_attention_flops
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.workload import GIB, Workload
from megatron_rl.weight_mapping import LatentAttention, ModelArchitecture, Role

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "nvfp4": 0.5 + 1 / 16}
"""Bytes per element of a quantised matrix, scales included (1 byte per 16 elements in NVFP4, 4 bytes per block of 128 x 128 in
FP8). Other parameters stay in bf16."""
SERVER_GIB = 4.0
"""vLLM's activations and CUDA graphs on each accelerator, as a part of what gpu_memory_utilization allows."""
PREFILL_EFFICIENCY = 0.4
"""Fraction of the peak that a prefill reaches."""


@dataclass(frozen=True)
class ServerPlan:
    """One vLLM server and its predicted speed."""

    tensor: int
    """Tensor-parallel size."""
    expert: int
    """Expert-parallel size: equal to `tensor`, or 1 if each expert is sharded over all ranks."""
    sequences: int
    """Sequences in flight at once."""
    weights_gib: float
    """On each accelerator."""
    cache_gib: float
    """KV caches of the sequences in flight, on each accelerator."""
    tokens_per_s: float
    """Generated tokens of the server."""
    limit: str
    """What takes most of a decoding step, and what bounds the batch."""


def kv_bytes_per_token(model: ModelArchitecture, work: Workload, tensor: int) -> float:
    """Bytes of KV cache per token over all layers, on each accelerator of a server.

    Args:
        model: The model's architecture.
        work: The training step.
        tensor: Tensor-parallel size. It does not divide MLA's compressed cache, which is replicated.

    Returns:
        The bytes.
    """
    a, p = model.attention, work.parameter_bytes
    if isinstance(a, LatentAttention):
        return float(p * (a.kv_lora_rank + a.qk_rope_head_dim) * model.num_layers)
    return 2.0 * p * a.head_dim * max(1.0, a.num_query_groups / tensor) * model.num_layers


def weight_bytes(counts: ParameterCounts, work: Workload) -> float:
    """Bytes of the full model in the servers' precision."""
    matrices = sum(counts.full_layers((Role.ATTENTION, Role.MLP, Role.EXPERT)))
    rest = counts.num_parameters - matrices
    return matrices * WEIGHT_BYTES[work.rollout_weights] + rest * (4.0 if work.rollout_weights == "fp32" else 2.0)


def server_plan(
    counts: ParameterCounts, work: Workload, machine: Machine, tensor: int, servers: int, *, utilization: float = 0.85
) -> ServerPlan | None:
    """Predicts memory and speed of a server.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        tensor: Tensor-parallel size of the server.
        servers: Number of servers, which share the sequences in flight.
        utilization: vLLM's gpu_memory_utilization.

    Returns:
        The server; None if the weights and the cache of one sequence do not fit.
    """
    model = counts.architecture
    weights = weight_bytes(counts, work) / tensor
    room = machine.memory_gib * GIB * utilization - SERVER_GIB * GIB - weights
    per_token = kv_bytes_per_token(model, work, tensor)
    if room < per_token * work.longest_sequence:
        return None
    # Sequences in flight are on average half complete; the KV cache is sized for that, and vLLM preempts if it is too small.
    context = work.mean_prompt + work.mean_response / 2
    bounds = {
        "servers.max_num_seqs": work.max_num_seqs,
        "room for caches": room / (per_token * context),
        "max_staleness": max(1.0, work.most_in_flight / servers),
    }
    bound = min(bounds, key=lambda name: bounds[name])
    sequences = int(bounds[bound])
    seconds, limit = decode_seconds(counts, work, machine, tensor, sequences, context)
    prefill = prefill_seconds(counts, work, machine, tensor)
    per_sequence = work.mean_response * seconds / sequences + prefill
    expert = tensor if model.moe and tensor > 1 and model.moe.num_experts % tensor == 0 else 1
    return ServerPlan(
        tensor,
        expert,
        sequences,
        weights / GIB,
        sequences * per_token * context / GIB,
        work.mean_response / per_sequence,
        f"{limit}; batch by {bound}",
    )


def decode_seconds(
    counts: ParameterCounts, work: Workload, machine: Machine, tensor: int, sequences: int, context: float
) -> tuple[float, str]:
    """Predicts one decoding step, which samples one token of each sequence.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        tensor: Tensor-parallel size of the server.
        sequences: Sequences in flight.
        context: Tokens that each sequence has so far, on average.

    Returns:
        Seconds of the step, and what takes most of them.
    """
    model, bandwidth = counts.architecture, machine.hbm_gb_s * 1e9 * machine.decode_efficiency
    experts = sum(counts.full_layers((Role.EXPERT,)))
    touched = 1.0
    if model.moe:
        touched = 1 - (1 - model.moe.top_k / model.moe.num_experts) ** sequences
    width = WEIGHT_BYTES[work.rollout_weights]
    weights = (weight_bytes(counts, work) - experts * width * (1 - touched)) / tensor / bandwidth
    cache = sequences * context * kv_bytes_per_token(model, work, tensor) / bandwidth
    flops = 2.0 * sequences * _active(counts) / tensor
    compute = flops / (machine.tflops(work.rollout_weights) * 1e12 * PREFILL_EFFICIENCY)
    row = work.parameter_bytes * model.hidden_size * sequences
    links = 4 * model.num_layers * ring_seconds(machine, Group(tensor, 1), row)
    parts = {
        "reading weights": max(weights, compute),
        "reading caches": cache,
        "links": links,
        "overhead": machine.decode_overhead_ms * 1e-3,
    }
    return sum(parts.values()), max(parts, key=lambda name: parts[name])


def prefill_seconds(counts: ParameterCounts, work: Workload, machine: Machine, tensor: int) -> float:
    """Seconds to prefill one prompt, divided by the samples that share it.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        tensor: Tensor-parallel size of the server.

    Returns:
        Seconds per sampled sequence.
    """
    flops = 2.0 * work.mean_prompt * _active(counts)
    flops += counts.architecture.num_layers * core_attention_flops(counts.architecture, work.mean_prompt, work.mean_prompt)
    return flops / (machine.tflops(work.rollout_weights) * 1e12 * PREFILL_EFFICIENCY * tensor) / work.samples_per_prompt


def _active(counts: ParameterCounts) -> float:
    """Parameters that are active for one token."""
    model = counts.architecture
    experts = sum(counts.full_layers((Role.EXPERT,)))
    return counts.num_parameters - (experts * (1 - model.moe.top_k / model.moe.num_experts) if model.moe else 0.0)


def best_server(counts: ParameterCounts, work: Workload, machine: Machine, gpus: int) -> ServerPlan | None:
    """Finds the tensor-parallel size with the most tokens per second and accelerator.

    Sizes are powers of two up to 64 that divide the attention heads and the accelerators.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.
        gpus: Number of accelerators for all servers.

    Returns:
        The best server; None if none fits.
    """
    attention = counts.architecture.attention
    plans = []
    tensor = 1
    while tensor <= min(gpus, 64):
        heads_divide = attention.num_heads % tensor == 0
        gpus_divide = gpus % tensor == 0
        if heads_divide and gpus_divide and (plan := server_plan(counts, work, machine, tensor, gpus // tensor)) is not None:
            plans.append(plan)
        tensor *= 2
    return max(plans, key=lambda plan: plan.tokens_per_s / plan.tensor, default=None)


def sync_seconds(counts: ParameterCounts, work: Workload, machine: Machine) -> float:
    """Seconds of a weight update.

    Rank 0 gathers every tensor and broadcasts it to all servers at once, so that its network card is the limit.

    Args:
        counts: Parameters of the model.
        work: The training step.
        machine: The machine.

    Returns:
        The seconds.
    """
    sent = counts.num_parameters * float(work.parameter_bytes)
    bandwidth = (machine.network_gb_s if not machine.cores else machine.nvlink_gb_s) * 1e9 * machine.link_efficiency
    return sent / bandwidth
