"""GLM-4.5 and 4.6: leading dense layers, sigmoid routing with a selection bias, a shared expert, biases on q, k and v."""

from typing import Any

from megatron_rl.weight_mapping.architecture import MixtureOfExperts
from megatron_rl.weight_mapping.hf_config import ConfigReader
from megatron_rl.weight_mapping.llama import Llama


class SigmoidExperts(Llama):
    """Common to the sparse layers of GLM and DeepSeek."""

    default_first_sparse_layer = 1
    default_groups = (1, 1)
    """Number of expert groups, and how many of them a token may choose from."""
    default_scaling_factor = 1.0

    def _experts(self, read: ConfigReader, num_layers: int) -> MixtureOfExperts | None:
        num_experts, top_k = read.experts("n_routed_experts", "num_local_experts")
        width, shared = read.integer("moe_intermediate_size"), read.count("n_shared_experts", 1)
        first = read.count("first_k_dense_replace", self.default_first_sparse_layer)
        groups, chosen = self.default_groups
        num_groups, top_k_groups = read.integer("n_group", default=groups), read.integer("topk_group", default=chosen)
        if num_groups > 1 and top_k != 2 * top_k_groups:
            read.reject(
                f"n_group = {num_groups}, topk_group = {top_k_groups}, num_experts_per_tok = {top_k}: Hugging Face ranks groups "
                "by their two best experts, Megatron by their num_experts_per_tok / topk_group best; "
                "these agree only where that is two"
            )
        read.only("norm_topk_prob", True, why="Megatron always divides the chosen sigmoid scores by their sum")
        read.only("scoring_func", "sigmoid", why="only sigmoid scores are built for this family")
        read.only("topk_method", "noaux_tc", why="only the choice by biased scores is built")
        read.only("moe_layer_freq", 1, why="only experts in every layer after the leading dense ones are built")
        layers = tuple(range(first, num_layers))
        if not layers:
            return None
        return MixtureOfExperts(
            num_experts,
            top_k,
            width,
            layers,
            normalize_top_k=True,
            scoring="sigmoid",
            selection_bias=True,
            num_groups=num_groups,
            top_k_groups=top_k_groups,
            scaling_factor=read.number("routed_scaling_factor", self.default_scaling_factor),
            shared_ffn_hidden_size=shared * width,
        )

    def _further_fields(self, read: ConfigReader) -> dict[str, Any]:
        return super()._further_fields(read) | {
            "num_mtp_layers": read.count("num_nextn_predict_layers", read.count("num_mtp_layers", 0))
        }


class Glm4Moe(SigmoidExperts):
    """GLM-4.5 and 4.6."""

    model_type = "glm4_moe"
    causal_lm = "Glm4MoeForCausalLM"
    default_max_positions = 131072
    default_norm_eps = 1e-5
    default_rotary_fraction = 0.5

    def _query_groups(self, read: ConfigReader, heads: int) -> int:
        return read.integer("num_key_value_heads")

    def _qk_norm(self, read: ConfigReader) -> bool:
        return read.flag("use_qk_norm", False)

    def _qkv_bias(self, read: ConfigReader) -> bool:
        return read.flag("attention_bias", False)
