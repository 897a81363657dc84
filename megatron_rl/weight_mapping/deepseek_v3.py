"""DeepSeek-V3, Kimi-K2 and Moonlight: latent attention, leading dense layers, sigmoid routing, shared experts."""

from types import MappingProxyType

from megatron_rl.weight_mapping.architecture import LatentAttention
from megatron_rl.weight_mapping.glm4_moe import SigmoidExperts
from megatron_rl.weight_mapping.hf_config import ConfigReader


class DeepseekV3(SigmoidExperts):
    """DeepSeek-V3; Moonlight has the same model_type."""

    model_type = "deepseek_v3"
    causal_lm = "DeepseekV3ForCausalLM"
    # transformers 5 leaves them out; vLLM then builds a router without the selection bias.
    written_out = MappingProxyType({"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    default_max_positions = 4096
    default_first_sparse_layer = 3
    default_groups = (8, 4)
    default_scaling_factor = 2.5

    def _attention(self, read: ConfigReader, hidden: int, num_layers: int) -> LatentAttention:
        heads = read.integer("num_attention_heads")
        if read.integer("num_key_value_heads", default=heads) != heads:
            read.reject("num_key_value_heads must equal num_attention_heads: latent attention has no groups")
        read.only("attention_bias", False, why="biases on the down projections are not built")
        read.only("rope_interleave", True, why="Megatron rotates interleaved pairs")
        # Derived from the sizes below; transformers writes them out.
        read.skip("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha")
        return LatentAttention(
            num_heads=heads,
            q_lora_rank=read.optional_integer("q_lora_rank"),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim"),
            v_head_dim=read.integer("v_head_dim"),
        )


class KimiK2(DeepseekV3):
    """DeepSeek-V3's architecture under another model_type; the published code is DeepSeek's."""

    model_type = "kimi_k2"
