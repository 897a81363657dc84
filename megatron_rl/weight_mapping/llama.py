"""Llama, and what the families that descend from it share with it."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.weight_mapping.architecture import GroupedQueryAttention, LatentAttention, MixtureOfExperts, ModelArchitecture
from megatron_rl.weight_mapping.attention_rules import attention_rules
from megatron_rl.weight_mapping.family import Family
from megatron_rl.weight_mapping.hf_config import ConfigReader
from megatron_rl.weight_mapping.mlp_rules import ExpertNames, dense_mlp_rules, expert_rules, router_rules
from megatron_rl.weight_mapping.naming import NamingScheme
from megatron_rl.weight_mapping.rules import MappingRule, vocabulary_rules


class Llama(Family):
    """Grouped-query attention and gated MLPs. Defaults are those of transformers' config classes."""

    model_type = "llama"
    causal_lm = "LlamaForCausalLM"
    default_head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    default_max_positions = 2048
    default_norm_eps = 1e-6
    default_theta = 10000.0
    default_rotary_fraction: float | None = None
    """None: complete heads are rotated, and no other value is accepted."""
    expert_names = ExpertNames()

    def architecture(self, hf_config: Mapping[str, Any]) -> ModelArchitecture:
        """See Family."""
        read = ConfigReader(hf_config)
        self._refuse_features(read)
        num_layers, hidden = read.integer("num_hidden_layers"), read.integer("hidden_size")
        model = ModelArchitecture(
            model_type=self.model_type,
            num_layers=num_layers,
            hidden_size=hidden,
            vocab_size=read.integer("vocab_size"),
            ffn_hidden_size=read.integer("intermediate_size"),
            attention=self._attention(read, hidden, num_layers),
            moe=self._experts(read, num_layers),
            rope=read.rope(self.default_theta, self.default_rotary_fraction),
            norm_eps=read.number("rms_norm_eps", self.default_norm_eps),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            max_position_embeddings=read.integer("max_position_embeddings", default=self.default_max_positions),
            initializer_range=read.number("initializer_range", 0.02),
            **self._further_fields(read),
        )
        read.finish()
        return model

    def rules(self, model: ModelArchitecture, padded_vocab_size: int, naming: NamingScheme) -> list[MappingRule]:
        """Vocabulary, attention, dense MLPs, and experts where the model has them."""
        rules = [
            *vocabulary_rules(model, padded_vocab_size),
            *attention_rules(model, naming),
            *dense_mlp_rules(model, naming),
        ]
        return rules + self._sparse_rules(model, model.moe, naming) if model.moe else rules

    def _sparse_rules(self, model: ModelArchitecture, moe: MixtureOfExperts, naming: NamingScheme) -> list[MappingRule]:
        return [*router_rules(model, moe, naming, self.expert_names), *expert_rules(model, moe, naming, self.expert_names)]

    def _attention(self, read: ConfigReader, hidden: int, num_layers: int) -> GroupedQueryAttention | LatentAttention:
        heads = read.integer("num_attention_heads")
        groups = self._query_groups(read, heads)
        if heads % groups:
            read.reject(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}")
        head_dim = read.integer("head_dim", default=self.default_head_dim or hidden // heads)
        return GroupedQueryAttention(heads, groups, head_dim, self._qk_norm(read), self._qkv_bias(read))

    def _query_groups(self, read: ConfigReader, heads: int) -> int:
        return read.integer("num_key_value_heads", default=heads)

    def _qk_norm(self, read: ConfigReader) -> bool:
        return False

    def _qkv_bias(self, read: ConfigReader) -> bool:
        read.only("attention_bias", False, why="Megatron cannot have biases on q, k, v and the output projection alone")
        return False

    def _experts(self, read: ConfigReader, num_layers: int) -> MixtureOfExperts | None:
        return None

    def _further_fields(self, read: ConfigReader) -> dict[str, Any]:
        """Fields of ModelArchitecture in which a family differs from Llama."""
        read.only("mlp_bias", False, why="Megatron cannot have biases on the MLP alone")
        return {}

    def _refuse_features(self, read: ConfigReader) -> None:
        read.only("hidden_act", "silu", why="only gated MLPs with silu are built")
        read.only("attention_dropout", 0, why="with dropout the trained policy would differ from the sampled one")
        read.only(
            "quantization_config", None, why="weights in this quantisation format cannot be read; dequantise the checkpoint first"
        )
        self._layer_types(read)

    def _layer_types(self, read: ConfigReader) -> None:
        layer_types = read.strings("layer_types")
        if set(layer_types) - {"full_attention"}:
            read.reject(f"layer_types = {layer_types}: only full_attention is supported by this family")
