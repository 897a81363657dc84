"""How Megatron names the same parameters under different layer specs."""

from dataclasses import dataclass, replace

LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class NamingScheme:
    """Parameter names within a layer that depend on the layer spec."""

    attention_norm: str
    dense_mlp_norm: str
    sparse_mlp_norm: str
    latent_attention_norm: str
    latent_q_norm: str
    latent_kv_norm: str
    expert_fc1: str
    expert_fc2: str
    """Ends with "weight"; `bias_of` gives the name of the bias next to it."""

    @staticmethod
    def bias_of(weight: str) -> str:
        """The name of the bias that belongs to a weight of experts."""
        before, _, after = weight.rpartition("weight")
        return f"{before}bias{after}"


LOCAL = NamingScheme(
    attention_norm="input_layernorm.weight",
    dense_mlp_norm="pre_mlp_layernorm.weight",
    sparse_mlp_norm="pre_mlp_layernorm.weight",
    latent_attention_norm="input_layernorm.weight",
    latent_q_norm="self_attention.q_layernorm.weight",
    latent_kv_norm="self_attention.kv_layernorm.weight",
    expert_fc1="mlp.experts.local_experts.{expert}.linear_fc1.weight",
    expert_fc2="mlp.experts.local_experts.{expert}.linear_fc2.weight",
)
"""Megatron's own modules and SequentialMLP."""

TRANSFORMER_ENGINE = NamingScheme(
    attention_norm="self_attention.linear_qkv.layer_norm_weight",
    dense_mlp_norm="mlp.linear_fc1.layer_norm_weight",
    # A sparse layer's norm feeds both router and experts, so it cannot be fused into a linear layer.
    sparse_mlp_norm="pre_mlp_layernorm.weight",
    # Two down projections follow it.
    latent_attention_norm="input_layernorm.weight",
    latent_q_norm="self_attention.linear_q_up_proj.layer_norm_weight",
    latent_kv_norm="self_attention.linear_kv_up_proj.layer_norm_weight",
    expert_fc1="mlp.experts.linear_fc1.weight{expert}",
    expert_fc2="mlp.experts.linear_fc2.weight{expert}",
)
"""Transformer Engine's modules: norms fused into the following linear layer, experts as one grouped GEMM."""

CHECKPOINT = replace(
    TRANSFORMER_ENGINE,
    expert_fc1="mlp.experts.experts.{expert}.linear_fc1.weight",
    expert_fc2="mlp.experts.experts.{expert}.linear_fc2.weight",
)
"""Keys of a dist-checkpoint, whichever layer spec built the model. All experts of a layer are in one tensor there,
[experts, outputs, inputs], under the name without the number."""
