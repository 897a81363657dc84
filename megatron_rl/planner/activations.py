"""Bytes of activations: what one layer keeps for its backward pass, per token, and how many tokens of it are in flight.

Counted from what each operation saves for its backward pass in Megatron-Core with Transformer Engine's layers (flash attention,
fused norms and gates): inputs of the linear maps, q, k, v and the output of attention, the gate's two halves. N is the number of
tokens of a microbatch on one context-parallel rank; the residual stream is cut by sequence parallelism as well.
"""

from dataclasses import dataclass

from megatron_rl.planner.workload import Candidate, Workload
from megatron_rl.weight_mapping import LatentAttention, ModelArchitecture


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer and one microbatch on one rank."""

    stream: float
    """The layer's input: all that full recomputation keeps."""
    attention: float
    mlp: float
    """Of a dense MLP, or of router, dispatcher, experts and shared experts together."""
    mlp_input: float
    """The part of `mlp` that selective recomputation of experts keeps."""

    @property
    def total(self) -> float:
        """Bytes of all that the layer keeps without recomputation."""
        return self.stream + self.attention + self.mlp


def tokens_per_rank(candidate: Candidate, tokens: float) -> float:
    """Rows of the residual stream on one rank."""
    return tokens / (candidate.layout.cp * candidate.sp)


def expert_tokens(model: ModelArchitecture, candidate: Candidate, tokens: float, imbalance: float) -> float:
    """Rows that the experts of the busiest rank compute for one microbatch: each token once for each of its experts.

    Ranks without sequence parallelism hold the same tokens, and send them all the same.
    """
    layout, moe = candidate.layout, model.moe
    assert moe is not None
    busiest = imbalance if layout.ep > 1 else 1.0
    return tokens_per_rank(candidate, tokens) * moe.top_k * layout.etp * busiest


def layer_bytes(model: ModelArchitecture, work: Workload, candidate: Candidate, tokens: float, *, sparse: bool) -> LayerBytes:
    """tokens: of one microbatch, over all context-parallel ranks."""
    p, rows = work.parameter_bytes, tokens_per_rank(candidate, tokens)
    stream = p * model.hidden_size * rows
    own = tokens / candidate.layout.cp / candidate.layout.tp  # tokens times this rank's share of the heads or of the width
    normed = stream  # output of a norm, which the following linear map keeps
    attention = normed + p * _attention_widths(model) * own + _latent_bytes(model, p, rows) + 4 * model.attention.num_heads * own
    mlp = stream + normed  # the second norm's input and output
    if not sparse:
        return LayerBytes(stream, attention, mlp + 3 * p * model.ffn_hidden_size * own, mlp)
    return LayerBytes(stream, attention, mlp + _expert_bytes(model, work, candidate, tokens), mlp)


def _attention_widths(model: ModelArchitecture) -> float:
    """Entries that a token keeps over all heads: q, k, v, the output; and where q and k are normed, what they were before."""
    a = model.attention
    if isinstance(a, LatentAttention):
        # k and v are views of one expanded tensor, which stays whole beside the k that has its rotary part.
        return a.num_heads * (2 * a.q_head_dim + a.qk_nope_head_dim + 2 * a.v_head_dim)
    q, kv = a.num_heads * a.head_dim, a.num_query_groups * a.head_dim
    return 2 * q + 2 * kv + (q + kv if a.qk_norm else 0)


def _latent_bytes(model: ModelArchitecture, p: int, rows: float) -> float:
    """Low-rank projections before and after their norms; every tensor-parallel rank has them of its own rows."""
    a = model.attention
    if not isinstance(a, LatentAttention):
        return 0.0
    return p * rows * (2 * (a.q_lora_rank or 0) + 2 * a.kv_lora_rank + a.qk_rope_head_dim)


def _expert_bytes(model: ModelArchitecture, work: Workload, candidate: Candidate, tokens: float) -> float:
    """The rows that were sent here, gate, up and their product.

    The router's fp32 scores, probabilities and map; shared experts.
    """
    moe, p = model.moe, work.parameter_bytes
    assert moe is not None
    rows = expert_tokens(model, candidate, tokens, work.imbalance)
    routed = p * rows * (model.hidden_size + 3 * moe.ffn_hidden_size / candidate.layout.etp)
    router = (3 * 4 + 1) * moe.num_experts * tokens_per_rank(candidate, tokens)
    shared = 3 * p * moe.shared_ffn_hidden_size * tokens / candidate.layout.cp / candidate.layout.tp
    return routed + router + shared


def kept_bytes(layer: LayerBytes, recompute: str, *, sparse: bool) -> float:
    """What stays between a layer's forward and backward pass."""
    if recompute == "full":
        return layer.stream
    if recompute == "selective" and sparse:
        return layer.stream + layer.attention + layer.mlp_input
    return layer.total


def workspace_bytes(layer: LayerBytes, recompute: str, *, sparse: bool) -> float:
    """What a layer's backward pass needs for a moment: what it recomputes, and the gradients of its largest part."""
    gradients = max(layer.attention, layer.mlp)
    if recompute == "full":
        return layer.attention + layer.mlp + gradients
    return gradients + (layer.mlp - layer.mlp_input if recompute == "selective" and sparse else 0.0)


def chunks_in_flight(pp: int, vpp: int, stage: int, microbatches: int) -> int:
    """The most forward passes of a chunk on one stage that wait for their backward pass (1F1B, interleaved where vpp > 1)."""
    total = microbatches * vpp
    warm_up = pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp
    return min(total, warm_up + 1)
