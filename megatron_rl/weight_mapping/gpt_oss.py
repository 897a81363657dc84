"""GPT-OSS: biases on all linear layers, attention sinks, windows in every other layer, a clamped gate, stacked experts."""

from typing import Any

from megatron_rl.weight_mapping.architecture import GroupedQueryAttention, MixtureOfExperts, ModelArchitecture
from megatron_rl.weight_mapping.hf_config import ConfigReader
from megatron_rl.weight_mapping.llama import Llama
from megatron_rl.weight_mapping.mlp_rules import ExpertNames, router_rules, stacked_expert_rules
from megatron_rl.weight_mapping.naming import NamingScheme
from megatron_rl.weight_mapping.rules import MappingRule

_SWIGLU_LIMIT = 7.0
"""A constant in transformers and in vLLM."""


class GptOss(Llama):
    """GPT-OSS 20B and 120B, with weights in bf16."""

    model_type = "gpt_oss"
    causal_lm = "GptOssForCausalLM"
    default_head_dim = 64
    default_max_positions = 131072
    default_norm_eps = 1e-5
    default_theta = 150000.0
    expert_names = ExpertNames(router="mlp.router")

    def _attention(self, read: ConfigReader, hidden: int, num_layers: int) -> GroupedQueryAttention:
        heads, groups = read.integer("num_attention_heads"), read.integer("num_key_value_heads")
        read.only("attention_bias", True, why="the published models have biases on all of q, k, v and the output projection")
        layer_types = read.strings("layer_types") or ["sliding_attention", "full_attention"] * (num_layers // 2 + 1)
        layer_types = layer_types[:num_layers]
        if set(layer_types) - {"sliding_attention", "full_attention"} or len(layer_types) != num_layers:
            read.reject(
                f"layer_types = {layer_types}: must be sliding_attention or full_attention for each of {num_layers} layers"
            )
        return GroupedQueryAttention(
            heads,
            groups,
            read.integer("head_dim", default=self.default_head_dim),
            qk_norm=False,
            qkv_bias=True,
            sinks=True,
            window=read.integer("sliding_window", default=128),
            windowed_layers=tuple(layer for layer, of in enumerate(layer_types) if of == "sliding_attention"),
        )

    def _experts(self, read: ConfigReader, num_layers: int) -> MixtureOfExperts:
        num_experts, top_k = read.experts("num_local_experts", "num_experts")
        read.skip("experts_per_token")  # an alias in published configs
        return MixtureOfExperts(
            num_experts, top_k, read.integer("intermediate_size"), tuple(range(num_layers)), normalize_top_k=True
        )

    def _further_fields(self, read: ConfigReader) -> dict[str, Any]:
        read.only("swiglu_limit", _SWIGLU_LIMIT, why="transformers and vLLM compute with this constant")
        read.skip("initial_context_length")  # repeated in the rope's settings
        return {"linear_biases": True, "swiglu_limit": _SWIGLU_LIMIT}

    def _layer_types(self, read: ConfigReader) -> None:
        """`_attention` reads them."""

    def _sparse_rules(self, model: ModelArchitecture, moe: MixtureOfExperts, naming: NamingScheme) -> list[MappingRule]:
        return [*router_rules(model, moe, naming, self.expert_names), *stacked_expert_rules(model, moe, naming)]
