"""GPT-OSS: biases everywhere, attention sinks, every other layer with a window, a clamped gate, experts stacked in one tensor."""

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
        kinds = read.strings("layer_types") or ["sliding_attention", "full_attention"] * (num_layers // 2 + 1)
        kinds = kinds[:num_layers]
        if set(kinds) - {"sliding_attention", "full_attention"} or len(kinds) != num_layers:
            read.reject(f"layer_types = {kinds}: has to name sliding_attention or full_attention for each of {num_layers} layers")
        windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
        return GroupedQueryAttention(
            heads, groups, read.integer("head_dim", default=self.default_head_dim), qk_norm=False, qkv_bias=True, sinks=True,
            window=read.integer("sliding_window", default=128), windowed_layers=windowed,
        )  # fmt: skip

    def _experts(self, read: ConfigReader, num_layers: int) -> MixtureOfExperts:
        num_experts, top_k = read.experts("num_local_experts", "num_experts")
        read.skip("experts_per_token")  # a second naming in published configs
        return MixtureOfExperts(
            num_experts, top_k, read.integer("intermediate_size"), tuple(range(num_layers)), normalize_top_k=True
        )

    def _particulars(self, read: ConfigReader) -> dict[str, Any]:
        read.only("swiglu_limit", _SWIGLU_LIMIT, why="transformers and vLLM compute with this constant")
        read.skip("initial_context_length")  # said again in the rope's settings
        return {"linear_biases": True, "swiglu_limit": _SWIGLU_LIMIT}

    def _layer_types(self, read: ConfigReader) -> None:
        """Read with the attention."""

    def _sparse_rules(self, model: ModelArchitecture, moe: MixtureOfExperts, naming: NamingScheme) -> list[MappingRule]:
        return [*router_rules(model, moe, naming, self.expert_names), *stacked_expert_rules(model, moe, naming)]
