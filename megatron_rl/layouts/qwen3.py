"""Qwen3: Llama's layers with norms on q and k; Qwen3-MoE has experts in some or all of its layers."""

from megatron_rl.layouts.architecture import MixtureOfExperts, ModelArchitecture
from megatron_rl.layouts.hf_config import ConfigReader
from megatron_rl.layouts.kinds import Single
from megatron_rl.layouts.llama import Llama
from megatron_rl.layouts.parameter import Role
from megatron_rl.layouts.rows import HF_LAYER, Row, mlp_kinds
from megatron_rl.layouts.spelling import LAYER, Spelling


class Qwen3(Llama):
    model_type = "qwen3"
    causal_lm = "Qwen3ForCausalLM"
    qk_norm = True
    default_head_dim = 128
    default_max_positions = 32768

    def _query_groups(self, read: ConfigReader, heads: int) -> int:
        # transformers' default is a constant that differs between the two classes: no value is safe to assume.
        return read.integer("num_key_value_heads")

    def _refuse_features(self, read: ConfigReader) -> None:
        super()._refuse_features(read)
        read.only("use_sliding_window", False, why="sliding-window attention is not supported by this family")
        # Without the switch above their values have no effect; published configs carry them all the same.
        read.skip("sliding_window", "max_window_layers")


class Qwen3Moe(Qwen3):
    model_type = "qwen3_moe"
    causal_lm = "Qwen3MoeForCausalLM"
    default_head_dim = None

    def _experts(self, read: ConfigReader, num_layers: int) -> MixtureOfExperts | None:
        num_experts, top_k = read.integer("num_experts", "num_local_experts"), read.integer("num_experts_per_tok")
        if top_k > num_experts:
            read.reject(f"num_experts_per_tok = {top_k} is more than num_experts = {num_experts}")
        every = read.integer("decoder_sparse_step", default=1)
        dense = read.layer_list("mlp_only_layers", num_layers)
        # The step counts layers from 1: with a step of 2, layers 1, 3, 5 are sparse.
        layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0)
        width = read.integer("moe_intermediate_size")
        # transformers leaves the chosen probabilities as they are unless the config says otherwise.
        normalize = read.flag("norm_topk_prob", False)
        return MixtureOfExperts(num_experts, top_k, width, layers, normalize) if layers else None

    def rows(self, model: ModelArchitecture, padded_vocab_size: int, spelling: Spelling) -> list[Row]:
        rows = super().rows(model, padded_vocab_size, spelling)
        return rows + _expert_rows(model, model.moe, spelling) if model.moe else rows


def _expert_rows(model: ModelArchitecture, moe: MixtureOfExperts, spelling: Spelling) -> list[Row]:
    hidden, count = model.hidden_size, moe.num_experts
    fc1, fc2 = mlp_kinds(moe.ffn_hidden_size, hidden)
    expert = HF_LAYER + "mlp.experts.{expert}."
    norm, router = (HF_LAYER + "post_attention_layernorm.weight",), (HF_LAYER + "mlp.gate.weight",)
    gate_up = (expert + "gate_proj.weight", expert + "up_proj.weight")
    return [
        Row(LAYER + spelling.sparse_mlp_norm, norm, Single((hidden,)), Role.NORM, layers=moe.layers),
        Row(LAYER + "mlp.router.weight", router, Single((count, hidden)), Role.ROUTER, layers=moe.layers),
        Row(LAYER + spelling.expert_fc1, gate_up, fc1, Role.EXPERT, layers=moe.layers, num_experts=count),
        Row(LAYER + spelling.expert_fc2, (expert + "down_proj.weight",), fc2, Role.EXPERT, layers=moe.layers, num_experts=count),
    ]
