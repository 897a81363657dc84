"""Rows of the attention of one layer, for both kinds of attention."""

from collections.abc import Sequence

from megatron_rl.weight_mapping.architecture import GroupedQueryAttention, LatentAttention, ModelArchitecture
from megatron_rl.weight_mapping.naming import LAYER, NamingScheme
from megatron_rl.weight_mapping.param_mappings import ParamMapping, QueryKeyValue, Single
from megatron_rl.weight_mapping.parameter import Role
from megatron_rl.weight_mapping.rules import HF_LAYER, MappingRule
from megatron_rl.weight_mapping.sharding import Split


def attention_rules(model: ModelArchitecture, spelling: NamingScheme) -> list[MappingRule]:
    """Norm and attention, in every layer."""
    if isinstance(model.attention, LatentAttention):
        return _latent_rules(model, model.attention, spelling)
    return _grouped_query_rules(model, model.attention, spelling)


def _row(
    model: ModelArchitecture, megatron: str, hf: Sequence[str], kind: ParamMapping, role: Role, shares: str | None = None
) -> MappingRule:
    names = tuple(HF_LAYER + name for name in hf)
    return MappingRule(
        LAYER + megatron, names, kind, role, layers=range(model.num_layers), scale_shared_with=shares and LAYER + shares
    )


def _grouped_query_rules(model: ModelArchitecture, attention: GroupedQueryAttention, spelling: NamingScheme) -> list[MappingRule]:
    """Norm, fused q-k-v, output projection; biases, norms of q and k, and sinks where the model has them."""
    heads, groups, width, hidden = attention.num_heads, attention.num_query_groups, attention.head_dim, model.hidden_size
    fused = [f"self_attn.{part}_proj." for part in "qkv"]
    output = Single((hidden, heads * width), Split(1))
    rows = [
        _row(model, spelling.attention_norm, ["input_layernorm.weight"], Single((hidden,)), Role.NORM),
        _row(
            model, "self_attention.linear_qkv.weight", [name + "weight" for name in fused], QueryKeyValue(heads, groups, width, hidden),
            Role.ATTENTION,
        ),
        _row(model, "self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], output, Role.ATTENTION),
    ]  # fmt: skip
    if attention.qkv_bias:
        bias = QueryKeyValue(heads, groups, width, None)
        rows.append(_row(model, "self_attention.linear_qkv.bias", [name + "bias" for name in fused], bias, Role.BIAS))
    if model.linear_biases:
        rows.append(_row(model, "self_attention.linear_proj.bias", ["self_attn.o_proj.bias"], Single((hidden,)), Role.BIAS))
    if attention.sinks:
        sinks = Single((heads,), Split(0))
        rows.append(_row(model, "self_attention.core_attention.softmax_offset", ["self_attn.sinks"], sinks, Role.BIAS))
    for part in "qk" if attention.qk_norm else "":
        norm, name = Single((width,)), f"self_attention.{part}_layernorm.weight"
        rows.append(_row(model, name, [f"self_attn.{part}_norm.weight"], norm, Role.NORM))
    return rows


def _latent_rules(model: ModelArchitecture, attention: LatentAttention, spelling: NamingScheme) -> list[MappingRule]:
    """Norm, down and up projections of q and of k and v, their norms, output projection.

    The down projections are whole on every rank (see the engine's ReplicatedLinear); Transformer Engine has them so, too.
    """
    heads, hidden = attention.num_heads, model.hidden_size
    q_rows, kv_rows = heads * attention.q_head_dim, heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank

    def linear(megatron: str, hf: str, kind: ParamMapping, shares: str | None = None) -> MappingRule:
        return _row(model, f"self_attention.{megatron}.weight", [f"self_attn.{hf}.weight"], kind, Role.ATTENTION, shares)

    rows = [_row(model, spelling.latent_attention_norm, ["input_layernorm.weight"], Single((hidden,)), Role.NORM)]
    if q_rank is None:
        rows.append(linear("linear_q_proj", "q_proj", Single((q_rows, hidden), Split(0))))
    else:
        rows += [
            linear("linear_q_down_proj", "q_a_proj", Single((q_rank, hidden))),
            _row(model, spelling.latent_q_norm, ["self_attn.q_a_layernorm.weight"], Single((q_rank,)), Role.NORM),
            linear("linear_q_up_proj", "q_b_proj", Single((q_rows, q_rank), Split(0))),
        ]
    # The server multiplies with both down projections in one matrix.
    shares = None if q_rank is None else "self_attention.linear_q_down_proj.weight"
    down = Single((kv_rank + attention.qk_rope_head_dim, hidden))
    return [
        *rows,
        linear("linear_kv_down_proj", "kv_a_proj_with_mqa", down, shares),
        _row(model, spelling.latent_kv_norm, ["self_attn.kv_a_layernorm.weight"], Single((kv_rank,)), Role.NORM),
        linear("linear_kv_up_proj", "kv_b_proj", Single((kv_rows, kv_rank), Split(0))),
        linear("linear_proj", "o_proj", Single((hidden, heads * attention.v_head_dim), Split(1))),
    ]
