"""Seconds of one layer's forward and backward pass on one rank, by kind of work."""

from dataclasses import dataclass

from megatron_rl.planner.activations import expert_tokens, tokens_per_rank
from megatron_rl.planner.collectives import Group, exchange_seconds, ring_seconds
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.workload import Candidate, Workload
from megatron_rl.weight_mapping import LatentAttention, ModelArchitecture

BACKWARD = 2.0
"""Matrix products of the backward pass per product of the forward pass: gradients of the input and of the weight."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of some work on one rank by kind; the kinds do not overlap."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Norms, gates, permutations and residuals, which are bound by memory, and kernel launches."""
    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    def times(self, factor: float) -> "Seconds":
        """The seconds, multiplied by `factor`."""
        return Seconds(*(factor * part for part in self.parts))

    @property
    def parts(self) -> tuple[float, ...]:
        """The values in the order of the fields."""
        return (self.matmul, self.attention, self.elementwise, self.tp, self.ep, self.cp)

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return sum(self.parts)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and one microbatch on one rank."""

    attention_part: Seconds
    """Forward pass of norms, projections and core attention."""
    mlp_part: Seconds
    """Forward pass of the MLP, or of router, dispatcher and experts."""
    core_attention: float
    """The part of the attention's forward pass that selective recomputation repeats."""

    @property
    def forward(self) -> Seconds:
        """Forward pass of the layer."""
        return self.attention_part + self.mlp_part

    def backward(self, recompute: str, *, sparse: bool) -> Seconds:
        """Backward pass of the layer.

        Each matrix product costs two. Collectives run once more, and those that weight gradients need are added. What is
        recomputed costs its forward pass.

        Args:
            recompute: "none", "selective" or "full".
            sparse: Whether the layer has experts.

        Returns:
            Seconds by kind.
        """
        f = self.forward
        # Sequence parallelism gathers a linear layer's input once more for its weight gradient.
        once = Seconds(BACKWARD * f.matmul, 2.5 * f.attention, BACKWARD * f.elementwise, 1.5 * f.tp, f.ep, 2 * f.cp)
        if recompute == "full":
            return once + f
        if recompute == "selective":
            return once + Seconds(attention=self.core_attention) + (self.mlp_part if sparse else Seconds())
        return once


def layer_seconds(
    model: ModelArchitecture,
    work: Workload,
    candidate: Candidate,
    machine: Machine,
    tokens: float,
    *,
    sparse: bool,
    precision: str = "bf16",
) -> LayerSeconds:
    """Predicts one layer.

    Args:
        model: The model's architecture.
        work: The training step.
        candidate: The layout.
        machine: The machine.
        tokens: Tokens of the microbatch, over all context-parallel ranks.
        sparse: Whether the layer has experts.
        precision: Precision of the linear layers: bf16, fp8 or nvfp4.

    Returns:
        Seconds on the busiest rank.
    """
    local = tokens / candidate.layout.cp
    peak = machine.tflops(precision) * 1e12 * machine.matmul_efficiency
    projections = 2.0 * local * attention_weights(model) / candidate.layout.tp
    core = core_attention_flops(model, local, work.attention_length) / candidate.layout.tp
    core_s = core / (machine.bf16_tflops * 1e12 * machine.attention_efficiency)
    overhead = machine.layer_overhead_us * 1e-6
    stream = work.parameter_bytes * model.hidden_size * tokens_per_rank(candidate, tokens)
    attention = Seconds(
        matmul=projections / peak,
        attention=core_s,
        elementwise=_memory_seconds(
            machine, 7 * stream + 4 * work.parameter_bytes * _qkv_width(model) * local / candidate.layout.tp
        )
        + overhead * (0.3 if sparse else 0.5),
        tp=_gather_and_scatter(model, work, candidate, machine, local),
        cp=_ring_attention(model, work, candidate, machine, local),
    )
    if sparse:
        return LayerSeconds(attention, _experts(model, work, candidate, machine, tokens, precision), core_s)
    dense = Seconds(
        matmul=6.0 * local * model.hidden_size * model.ffn_hidden_size / candidate.layout.tp / peak,
        elementwise=_memory_seconds(
            machine, 5 * stream + 5 * work.parameter_bytes * model.ffn_hidden_size * local / candidate.layout.tp
        )
        + overhead * 0.2,
        tp=_gather_and_scatter(model, work, candidate, machine, local),
    )
    return LayerSeconds(attention, dense, core_s)


def _experts(
    model: ModelArchitecture, work: Workload, candidate: Candidate, machine: Machine, tokens: float, precision: str
) -> Seconds:
    moe, layout, p = model.moe, candidate.layout, work.parameter_bytes
    assert moe is not None
    peak, local = machine.tflops(precision) * 1e12, tokens / layout.cp
    own, rows = tokens_per_rank(candidate, tokens), expert_tokens(model, candidate, tokens, work.imbalance)
    experts_here = moe.num_experts / layout.ep
    rows_each = rows / experts_here
    reached = machine.expert_efficiency * rows_each / (rows_each + machine.expert_half_rows)
    width = moe.ffn_hidden_size / layout.etp
    compute = 6.0 * rows * model.hidden_size * width / (peak * reached)
    weights = 3.0 * p * experts_here * model.hidden_size * width  # read once, whatever the number of rows
    shared = 6.0 * local * model.hidden_size * moe.shared_ffn_hidden_size / layout.tp
    router = 2.0 * own * model.hidden_size * moe.num_experts
    moved = p * (5 * model.hidden_size * own + 6 * model.hidden_size * rows / layout.etp + 5 * width * rows)
    group = Group(layout.ep, layout.etp)
    sent = p * model.hidden_size * own * moe.top_k * (work.imbalance if layout.ep > 1 else 1.0)
    gathered = ring_seconds(machine, Group(layout.etp, 1), p * model.hidden_size * rows)
    return Seconds(
        matmul=max(compute, _memory_seconds(machine, weights)) + (shared + router) / (peak * machine.matmul_efficiency),
        elementwise=_memory_seconds(machine, moved) + machine.layer_overhead_us * 1e-6 * 0.7,
        tp=_gather_and_scatter(model, work, candidate, machine, local) if moe.shared_ffn_hidden_size else 0.0,
        ep=2 * exchange_seconds(machine, group, sent) + 2 * gathered,
    )


def _memory_seconds(machine: Machine, moved: float) -> float:
    return moved / (machine.hbm_gb_s * 1e9 * machine.memory_efficiency)


def _gather_and_scatter(model: ModelArchitecture, work: Workload, candidate: Candidate, machine: Machine, local: float) -> float:
    """A column-parallel and a row-parallel linear layer: all-gather before, reduce-scatter after (or one all-reduce, as long)."""
    full = work.parameter_bytes * model.hidden_size * local
    return 2 * ring_seconds(machine, Group(candidate.layout.tp, 1), full)


def _ring_attention(model: ModelArchitecture, work: Workload, candidate: Candidate, machine: Machine, local: float) -> float:
    """The keys and values of every context-parallel rank travel once around the ring."""
    layout = candidate.layout
    if layout.cp == 1:
        return 0.0
    a = model.attention
    kv = a.num_heads * (a.q_head_dim + a.v_head_dim) if isinstance(a, LatentAttention) else 2 * a.num_query_groups * a.head_dim
    return ring_seconds(machine, Group(layout.cp, layout.tp), work.parameter_bytes * kv * local * layout.cp / layout.tp)


def attention_weights(model: ModelArchitecture) -> float:
    """Elements of one layer's attention projections."""
    a, h = model.attention, model.hidden_size
    if isinstance(a, LatentAttention):
        q = h * a.q_lora_rank + a.q_lora_rank * a.num_heads * a.q_head_dim if a.q_lora_rank else h * a.num_heads * a.q_head_dim
        kv = h * (a.kv_lora_rank + a.qk_rope_head_dim) + a.kv_lora_rank * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
        return float(q + kv + a.num_heads * a.v_head_dim * h)
    return float(h * a.head_dim * (2 * a.num_heads + 2 * a.num_query_groups))


def core_attention_flops(model: ModelArchitecture, tokens: float, length: float) -> float:
    """FLOPs of the core attention's forward pass, averaged over the layers.

    Counts the products of q with k and of the weights with v for the half that the causal mask leaves, and in a layer with a
    sliding window those inside the window.

    Args:
        model: The model's architecture.
        tokens: Tokens of the microbatch.
        length: Length of the sequence that the average token is in.

    Returns:
        FLOPs of one layer over all heads.
    """
    a = model.attention
    if isinstance(a, LatentAttention):
        return tokens * length * a.num_heads * (a.q_head_dim + a.v_head_dim)
    windowed = len(a.windowed_layers) / model.num_layers
    seen = (1 - windowed) * length / 2 + windowed * min(length / 2, a.window or length)
    return 4.0 * tokens * seen * a.num_heads * a.head_dim


def _qkv_width(model: ModelArchitecture) -> float:
    a = model.attention
    if isinstance(a, LatentAttention):
        return a.num_heads * (2 * a.q_head_dim + a.v_head_dim)
    return (a.num_heads + 2 * a.num_query_groups) * a.head_dim
