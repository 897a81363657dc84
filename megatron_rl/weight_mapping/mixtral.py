"""Mixtral: Llama's attention, experts in every layer."""

from megatron_rl.weight_mapping.architecture import MixtureOfExperts
from megatron_rl.weight_mapping.hf_config import ConfigReader
from megatron_rl.weight_mapping.llama import Llama
from megatron_rl.weight_mapping.mlp_rules import ExpertNames


class Mixtral(Llama):
    """Mixtral 8x7B and 8x22B."""

    model_type = "mixtral"
    causal_lm = "MixtralForCausalLM"
    default_max_positions = 131072
    default_norm_eps = 1e-5
    default_theta = 1000000.0
    expert_names = ExpertNames(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"
    )

    def _query_groups(self, read: ConfigReader, heads: int) -> int:
        return read.integer("num_key_value_heads")

    def _experts(self, read: ConfigReader, num_layers: int) -> MixtureOfExperts:
        num_experts, top_k = read.experts("num_local_experts", "num_experts")
        width = read.integer("intermediate_size")
        # Softmax over the chosen experts' logits: the same as dividing the chosen probabilities by their sum.
        return MixtureOfExperts(num_experts, top_k, width, tuple(range(num_layers)), normalize_top_k=True)

    def _refuse_features(self, read: ConfigReader) -> None:
        super()._refuse_features(read)
        read.only("sliding_window", None, why="sliding-window attention is not supported by this family")
        read.only(
            "router_jitter_noise",
            0,
            why="with noise on the router's input the trained policy would differ from the sampled one",
        )
