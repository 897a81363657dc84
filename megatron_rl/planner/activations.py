"""Bytes of activations: what one layer keeps of a microbatch for its backward pass, and how many microbatches are in flight.

Counted from what each operation saves for its backward pass in Megatron-Core with Transformer Engine's layers (flash attention,
fused norms and gates): inputs of the linear layers, q, k, v and the output of attention, both halves of the gated activation.
Context parallelism divides the tokens of a microbatch; sequence parallelism also shards the residual stream.
"""

from dataclasses import dataclass

from megatron_rl.planner.workload import Candidate, Workload
from megatron_rl.weight_mapping import LatentAttention, ModelArchitecture


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one microbatch on one rank."""

    stream: float
    """The layer's input, which is all that full recomputation keeps."""
    attention: float
    mlp: float
    """A dense MLP, or router, dispatcher, experts and shared experts together."""
    mlp_input: float
    """The part of `mlp` that selective recomputation of experts keeps."""

    @property
    def total(self) -> float:
        """Bytes that the layer keeps without recomputation."""
        return self.stream + self.attention + self.mlp


def tokens_per_rank(candidate: Candidate, tokens: float) -> float:
    """Rows of the residual stream on one rank."""
    return tokens / (candidate.layout.cp * candidate.sp)


def expert_tokens(model: ModelArchitecture, candidate: Candidate, tokens: float, imbalance: float) -> float:
    """Rows that the experts of the busiest rank compute for one microbatch: each token once for each of its experts.

    Without sequence parallelism tensor-parallel ranks hold the same tokens, and each dispatches all of them.

    Args:
        model: The architecture of a mixture of experts.
        candidate: The layout.
        tokens: Tokens of the microbatch, over all context-parallel ranks.
        imbalance: Tokens of the busiest rank's experts over the mean.

    Returns:
        The number of rows.
    """
    layout, moe = candidate.layout, model.moe
    assert moe is not None
    busiest = imbalance if layout.ep > 1 else 1.0
    return tokens_per_rank(candidate, tokens) * moe.top_k * layout.etp * busiest


def layer_bytes(model: ModelArchitecture, work: Workload, candidate: Candidate, tokens: float, *, sparse: bool) -> LayerBytes:
    """Bytes that one layer keeps for its backward pass.

    Args:
        model: The model's architecture.
        work: The training step.
        candidate: The layout.
        tokens: Tokens of the microbatch, over all context-parallel ranks.
        sparse: Whether the layer has experts.

    Returns:
        The bytes on one rank, by part of the layer.
    """
    p, rows = work.parameter_bytes, tokens_per_rank(candidate, tokens)
    stream = p * model.hidden_size * rows
    own = tokens / candidate.layout.cp / candidate.layout.tp  # tokens over the shards of the heads or of the width
    normed = stream  # output of a norm, which the following linear layer keeps
    attention = normed + p * _attention_widths(model) * own + _latent_bytes(model, p, rows) + 4 * model.attention.num_heads * own
    mlp = stream + normed  # the second norm's input and output
    if not sparse:
        return LayerBytes(stream, attention, mlp + 3 * p * model.ffn_hidden_size * own, mlp)
    return LayerBytes(stream, attention, mlp + _expert_bytes(model, work, candidate, tokens), mlp)


def _attention_widths(model: ModelArchitecture) -> float:
    """Elements that a token keeps over all heads: q, k, v, the output; with QK norm also q and k before the norm."""
    a = model.attention
    if isinstance(a, LatentAttention):
        # k and v are views of one expanded tensor, which is kept in full in addition to the k that has the rotary part.
        return a.num_heads * (2 * a.q_head_dim + a.qk_nope_head_dim + 2 * a.v_head_dim)
    q, kv = a.num_heads * a.head_dim, a.num_query_groups * a.head_dim
    return 2 * q + 2 * kv + (q + kv if a.qk_norm else 0)


def _latent_bytes(model: ModelArchitecture, p: int, rows: float) -> float:
    """Low-rank projections before and after their norms; each tensor-parallel rank has all of their columns for its rows."""
    a = model.attention
    if not isinstance(a, LatentAttention):
        return 0.0
    return p * rows * (2 * (a.q_lora_rank or 0) + 2 * a.kv_lora_rank + a.qk_rope_head_dim)


def _expert_bytes(model: ModelArchitecture, work: Workload, candidate: Candidate, tokens: float) -> float:
    """Routed rows with gate, up and their product; the router's fp32 scores, probabilities and map; shared experts."""
    moe, p = model.moe, work.parameter_bytes
    assert moe is not None
    rows = expert_tokens(model, candidate, tokens, work.imbalance)
    routed = p * rows * (model.hidden_size + 3 * moe.ffn_hidden_size / candidate.layout.etp)
    router = (3 * 4 + 1) * moe.num_experts * tokens_per_rank(candidate, tokens)
    shared = 3 * p * moe.shared_ffn_hidden_size * tokens / candidate.layout.cp / candidate.layout.tp
    return routed + router + shared


def kept_bytes(layer: LayerBytes, recompute: str, *, sparse: bool) -> float:
    """Bytes that stay allocated between a layer's forward and backward pass.

    Args:
        layer: Bytes of the layer without recomputation.
        recompute: "none", "selective" or "full".
        sparse: Whether the layer has experts.

    Returns:
        The bytes on one rank.
    """
    if recompute == "full":
        return layer.stream
    if recompute == "selective" and sparse:
        return layer.stream + layer.attention + layer.mlp_input
    return layer.total


def workspace_bytes(layer: LayerBytes, recompute: str, *, sparse: bool) -> float:
    """Bytes that exist only during a layer's backward pass: recomputed activations, and gradients of the larger part.

    Args:
        layer: Bytes of the layer without recomputation.
        recompute: "none", "selective" or "full".
        sparse: Whether the layer has experts.

    Returns:
        The bytes on one rank.
    """
    gradients = max(layer.attention, layer.mlp)
    if recompute == "full":
        return layer.attention + layer.mlp + gradients
    return gradients + (layer.mlp - layer.mlp_input if recompute == "selective" and sparse else 0.0)


def chunks_in_flight(pp: int, vpp: int, stage: int, microbatches: int) -> int:
    """Largest number of a stage's forward passes that wait for their backward pass: 1F1B, interleaved if vpp > 1.

    Args:
        pp: Pipeline stages.
        vpp: Virtual chunks of a stage.
        stage: Index of the pipeline stage.
        microbatches: Microbatches of the step.

    Returns:
        The number of passes, each of one microbatch through one chunk.
    """
    total = microbatches * vpp
    warm_up = pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp
    return min(total, warm_up + 1)
