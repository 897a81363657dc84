"""Qwen3: Llama's layers with norms on q and k; Qwen3-MoE has experts in some or all of its layers."""

from megatron_rl.weight_mapping.architecture import MixtureOfExperts
from megatron_rl.weight_mapping.hf_config import ConfigReader
from megatron_rl.weight_mapping.llama import Llama


class Qwen3(Llama):
    """Qwen3, dense: Llama with norms on the heads of q and k."""

    model_type = "qwen3"
    causal_lm = "Qwen3ForCausalLM"
    default_head_dim: int | None = 128
    default_max_positions = 32768

    def _qk_norm(self, read: ConfigReader) -> bool:
        return True

    def _query_groups(self, read: ConfigReader, heads: int) -> int:
        # transformers' default is a constant that differs between the two classes: no default is safe.
        return read.integer("num_key_value_heads")

    def _refuse_features(self, read: ConfigReader) -> None:
        super()._refuse_features(read)
        read.only("use_qk_norm", True, why="this family norms queries and keys always")  # written into Qwen3-Coder's config.json
        read.only("use_sliding_window", False, why="sliding-window attention is not supported by this family")
        # Without the switch above their values have no effect; published configs carry them all the same.
        read.skip("sliding_window", "max_window_layers")


class Qwen3Moe(Qwen3):
    """Qwen3 with experts in every n-th layer."""

    model_type = "qwen3_moe"
    causal_lm = "Qwen3MoeForCausalLM"
    default_head_dim = None

    def _experts(self, read: ConfigReader, num_layers: int) -> MixtureOfExperts | None:
        num_experts, top_k = read.experts("num_experts", "num_local_experts")
        every = read.integer("decoder_sparse_step", default=1)
        dense = read.layer_list("mlp_only_layers", num_layers)
        # The step counts layers from 1: with a step of 2, layers 1, 3, 5 are sparse.
        layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0)
        width = read.integer("moe_intermediate_size")
        # transformers leaves the chosen probabilities as they are unless the config says otherwise.
        normalize = read.flag("norm_topk_prob", False)
        return MixtureOfExperts(num_experts, top_k, width, layers, normalize) if layers else None
