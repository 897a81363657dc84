"""Mapping rules of the attention of one layer: grouped-query attention and latent attention."""

from collections.abc import Sequence

from megatron_rl.weight_mapping.architecture import GroupedQueryAttention, LatentAttention, ModelArchitecture
from megatron_rl.weight_mapping.naming import LAYER, NamingScheme
from megatron_rl.weight_mapping.param_mappings import DirectMapping, ParamMapping, QkvMapping
from megatron_rl.weight_mapping.parameter import Role
from megatron_rl.weight_mapping.rules import HF_LAYER, MappingRule
from megatron_rl.weight_mapping.sharding import Split


def attention_rules(model: ModelArchitecture, naming: NamingScheme) -> list[MappingRule]:
    """Norm and attention, in every layer."""
    if isinstance(model.attention, LatentAttention):
        return _latent_rules(model, model.attention, naming)
    return _grouped_query_rules(model, model.attention, naming)


def _rule(
    model: ModelArchitecture, megatron: str, hf: Sequence[str], mapping: ParamMapping, role: Role, shares: str | None = None
) -> MappingRule:
    names = tuple(HF_LAYER + name for name in hf)
    return MappingRule(
        LAYER + megatron, names, mapping, role, layers=range(model.num_layers), scale_shared_with=shares and LAYER + shares
    )


def _grouped_query_rules(model: ModelArchitecture, attention: GroupedQueryAttention, naming: NamingScheme) -> list[MappingRule]:
    """Norm, fused q-k-v, output projection; biases, norms of q and k, and sinks where the model has them."""
    heads, groups, width, hidden = attention.num_heads, attention.num_query_groups, attention.head_dim, model.hidden_size
    fused = [f"self_attn.{part}_proj." for part in "qkv"]
    qkv = QkvMapping(heads, groups, width, hidden)
    output = DirectMapping((hidden, heads * width), Split(1))
    rules = [
        _rule(model, naming.attention_norm, ["input_layernorm.weight"], DirectMapping((hidden,)), Role.NORM),
        _rule(model, "self_attention.linear_qkv.weight", [name + "weight" for name in fused], qkv, Role.ATTENTION),
        _rule(model, "self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], output, Role.ATTENTION),
    ]
    if attention.qkv_bias:
        bias = QkvMapping(heads, groups, width, None)
        rules.append(_rule(model, "self_attention.linear_qkv.bias", [name + "bias" for name in fused], bias, Role.BIAS))
    if model.linear_biases:
        rules.append(
            _rule(model, "self_attention.linear_proj.bias", ["self_attn.o_proj.bias"], DirectMapping((hidden,)), Role.BIAS)
        )
    if attention.sinks:
        sinks = DirectMapping((heads,), Split(0))
        rules.append(_rule(model, "self_attention.core_attention.softmax_offset", ["self_attn.sinks"], sinks, Role.BIAS))
    for part in "qk" if attention.qk_norm else "":
        norm, name = DirectMapping((width,)), f"self_attention.{part}_layernorm.weight"
        rules.append(_rule(model, name, [f"self_attn.{part}_norm.weight"], norm, Role.NORM))
    return rules


def _latent_rules(model: ModelArchitecture, attention: LatentAttention, naming: NamingScheme) -> list[MappingRule]:
    """Norm, down and up projections of q and of k and v, their norms, output projection.

    Every rank holds the full down projections (see the engine's ReplicatedLinear), as in Transformer Engine.
    """
    heads, hidden = attention.num_heads, model.hidden_size
    q_rows, kv_rows = heads * attention.q_head_dim, heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank

    def linear(megatron: str, hf: str, mapping: ParamMapping, shares: str | None = None) -> MappingRule:
        return _rule(model, f"self_attention.{megatron}.weight", [f"self_attn.{hf}.weight"], mapping, Role.ATTENTION, shares)

    rules = [_rule(model, naming.latent_attention_norm, ["input_layernorm.weight"], DirectMapping((hidden,)), Role.NORM)]
    if q_rank is None:
        rules.append(linear("linear_q_proj", "q_proj", DirectMapping((q_rows, hidden), Split(0))))
    else:
        rules += [
            linear("linear_q_down_proj", "q_a_proj", DirectMapping((q_rank, hidden))),
            _rule(model, naming.latent_q_norm, ["self_attn.q_a_layernorm.weight"], DirectMapping((q_rank,)), Role.NORM),
            linear("linear_q_up_proj", "q_b_proj", DirectMapping((q_rows, q_rank), Split(0))),
        ]
    # The server fuses both down projections into one matrix.
    shares = None if q_rank is None else "self_attention.linear_q_down_proj.weight"
    down = DirectMapping((kv_rank + attention.qk_rope_head_dim, hidden))
    return [
        *rules,
        linear("linear_kv_down_proj", "kv_a_proj_with_mqa", down, shares),
        _rule(model, naming.latent_kv_norm, ["self_attn.kv_a_layernorm.weight"], DirectMapping((kv_rank,)), Role.NORM),
        linear("linear_kv_up_proj", "kv_b_proj", DirectMapping((kv_rows, kv_rank), Split(0))),
        linear("linear_proj", "o_proj", DirectMapping((hidden, heads * attention.v_head_dim), Split(1))),
    ]
