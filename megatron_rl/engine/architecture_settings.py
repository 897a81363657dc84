"""From a ModelArchitecture to arguments of Megatron-Core's configuration, by the part of the model."""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.weight_mapping import GroupedQueryAttention, LatentAttention, ModelArchitecture, Rope


def attention_settings(model: ModelArchitecture) -> dict[str, Any]:
    """Arguments of TransformerConfig, with latent attention of MLATransformerConfig."""
    attention = model.attention
    common = {"num_attention_heads": attention.num_heads, "num_query_groups": attention.num_query_groups}
    if isinstance(attention, LatentAttention):
        return common | _latent_settings(attention) | _latent_rope_settings(model.rope)
    return common | _grouped_query_settings(attention, model.num_layers)


def _grouped_query_settings(attention: GroupedQueryAttention, num_layers: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm,
        "add_qkv_bias": attention.qkv_bias,
        "softmax_type": "learnable" if attention.sinks else "vanilla",
    }
    if attention.windowed_layers:
        assert attention.window is not None
        settings["window_size"] = (attention.window - 1, 0)  # Megatron counts the tokens before and after a token
        settings["window_attn_skip_freq"] = [int(layer in attention.windowed_layers) for layer in range(num_layers)]
    return settings


def _latent_settings(attention: LatentAttention) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_head_dim": attention.qk_nope_head_dim,
        "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "qk_layernorm": True,
    }


def _latent_rope_settings(rope: Rope) -> dict[str, Any]:
    """Latent attention makes its own rotary embedding, from the configuration alone. Its default is YaRN with a factor of 40."""
    if rope.kind == "default" and rope.fraction == 1.0:
        return {"rope_type": "rope", "rotary_base": rope.theta, "rotary_scaling_factor": 1.0}
    yarn = rope.yarn
    if yarn is None or rope.fraction != 1.0 or not yarn.truncate or None in (yarn.mscale, yarn.mscale_all_dim):
        raise UnsupportedModelError(
            f"{rope}: with latent attention Megatron-Core builds the default rope, or YaRN with mscale and mscale_all_dim given "
            "and its bounds rounded, over the complete rotary part of a head; it cannot train this model"
        )
    return {
        "rope_type": "yarn",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": rope.factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def gate_settings(model: ModelArchitecture) -> dict[str, Any]:
    """Arguments of TransformerConfig for the gated MLP, dense and of an expert."""
    if model.swiglu_limit is None:
        return {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": model.linear_biases}
    return {
        "gated_linear_unit": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": model.swiglu_limit,
        "glu_linear_offset": 1.0,
        "add_bias_linear": model.linear_biases,
        "bias_dropout_fusion": False,
    }


def expert_settings(model: ModelArchitecture, *, grouped_products: bool) -> dict[str, Any]:
    """Arguments of TransformerConfig for router and experts.

    Args:
        model: What the model is.
        grouped_products: All experts of a rank in one matrix product (Transformer Engine).
    """
    moe = model.moe
    if moe is None:
        return {"moe_token_dispatcher_type": "alltoall"}  # unused; with the default Megatron refuses stages of packed sequences
    settings = {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_layer_freq": model.moe_layer_freq,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": grouped_products,
        "moe_router_score_function": moe.scoring,
    }
    if moe.shared_ffn_hidden_size:
        settings["moe_shared_expert_intermediate_size"] = moe.shared_ffn_hidden_size
    if moe.scoring == "softmax":
        # Softmax over all experts and then top-k where the chosen probabilities are used as they are; over the chosen alone is
        # the same as dividing by their sum. The router's product is in the model's dtype, as in vLLM and Hugging Face, softmax
        # in fp32.
        return settings | {"moe_router_pre_softmax": not moe.normalize_top_k, "moe_router_dtype": None}
    return settings | dict(
        # As in Hugging Face, the product too is in fp32: the scores are close to one another, and the bias is in fp32.
        moe_router_dtype="fp32",
        moe_router_topk_scaling_factor=moe.scaling_factor,
        moe_router_enable_expert_bias=moe.selection_bias,
        # The rollouts' routes are replayed: a trainer that moved the bias by its own count would change the policy unnoticed.
        moe_router_bias_update_rate=0.0,
        **({"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.top_k_groups} if moe.num_groups > 1 else {}),
    )


def rope_arguments(model: ModelArchitecture) -> dict[str, Any]:
    """Arguments of GPTModel; latent attention makes its own rotary embedding, and wants none from the model."""
    rope = model.rope
    if isinstance(model.attention, LatentAttention):
        return {"position_embedding_type": "rope"}
    if rope.kind == "yarn" and rope.fraction != 1.0:
        raise UnsupportedModelError(
            f"{rope}: Megatron-Core's YaRN rotates complete heads only (a rotary fraction of 1), so it cannot train this model"
        )
    return {
        "position_embedding_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.fraction,
        "rope_scaling": rope.kind == "llama3",
        "rope_scaling_factor": rope.factor,
        "seq_len_interpolation_factor": rope.factor if rope.kind == "linear" else None,
    }


def yarn_attributes(rope: Rope) -> dict[str, Any]:
    """GPTModel looks for YaRN's constants among the attributes of its configuration, which has no such fields."""
    yarn = rope.yarn
    if yarn is None:
        return {}
    return {
        "yarn_rotary_scaling_factor": rope.factor,
        "yarn_original_max_position_embeddings": yarn.original_max_position_embeddings,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": yarn.mscale,
        "yarn_mscale_all_dim": yarn.mscale_all_dim,
        "yarn_correction_range_round_to_int": yarn.truncate,
    }
