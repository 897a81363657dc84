"""The table as a whole: counts against published models, names, groups and roles."""

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.weight_mapping import TRANSFORMER_ENGINE, ParameterTable, Role, TensorMismatchError, names_completed_by

DATA = Path(__file__).parents[2] / "data"
FAMILIES = json.loads((DATA / "small_families.json").read_text())
MODELS = json.loads((DATA / "small_models.json").read_text())
PUBLISHED = json.loads((DATA / "published_configs.json").read_text())
FC1 = "decoder.layers.1.mlp.experts.local_experts.5.linear_fc1.weight"


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3-235B-A22B"])
def test_parameter_counts_of_published_models(name: str) -> None:
    table = ParameterTable(PUBLISHED[name]["config"])
    assert table.num_parameters == PUBLISHED[name]["parameters_without_mtp"]


def test_padding_is_not_counted() -> None:
    padded = ParameterTable(MODELS["qwen3_moe"], padded_vocab_size=128)
    assert padded["output_layer.weight"].shape == (128, 24)
    assert padded.num_parameters == ParameterTable(MODELS["qwen3_moe"]).num_parameters


@pytest.mark.parametrize("model", MODELS)
def test_names_are_unique_on_both_sides(model: str) -> None:
    table = ParameterTable(MODELS[model])
    assert len({parameter.name for parameter in table.parameters}) == len(table.parameters)
    assert len(table.hf_shapes) == sum(len(parameter.hf) for parameter in table.parameters)
    for name in table.hf_shapes:
        (parameter,) = table.by_hf_name(name)
        assert name in [tensor.name for tensor in parameter.hf]


def test_experts_may_share_a_tensor() -> None:
    table = ParameterTable(FAMILIES["gpt_oss_moe"])
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert table.hf_shapes[name] == (4, 24, 56)
    assert [parameter.expert for parameter in table.by_hf_name(name)] == [0, 1, 2, 3]
    assert [names_completed_by(parameter) for parameter in table.by_hf_name(name)] == [[], [], [], [name]]


def test_down_projections_of_latent_attention_share_a_scale() -> None:
    table, attention = ParameterTable(FAMILIES["deepseek_v3_moe"]), "decoder.layers.2.self_attention."
    q, kv = (table[f"{attention}linear_{part}_down_proj.weight"] for part in ("q", "kv"))
    assert q.quantisation_group == kv.quantisation_group == q.name
    assert table[attention + "linear_kv_up_proj.weight"].quantisation_group == attention + "linear_kv_up_proj.weight"
    direct = ParameterTable(FAMILIES["moonlight_moe"])  # q is projected directly
    kv = direct[attention + "linear_kv_down_proj.weight"]
    assert kv.quantisation_group == kv.name


def test_the_selection_bias_stays_in_fp32() -> None:
    table = ParameterTable(FAMILIES["glm4_moe"])
    bias = table["decoder.layers.1.mlp.router.expert_bias"]
    assert (bias.dtype, bias.role) == (torch.float32, Role.SELECTION_BIAS)
    assert table["decoder.layers.1.mlp.router.weight"].dtype is None


def test_expert_of_a_mixed_model() -> None:
    parameter = ParameterTable(MODELS["qwen3_moe"])[FC1]
    assert [tensor.name for tensor in parameter.hf] == [
        "model.layers.1.mlp.experts.5.gate_proj.weight",
        "model.layers.1.mlp.experts.5.up_proj.weight",
    ]
    assert (parameter.layer, parameter.expert, parameter.shape, parameter.role) == (1, 5, (56, 24), Role.EXPERT)


def test_tied_embeddings_are_there_once() -> None:
    table = ParameterTable(MODELS["qwen3"])
    assert "lm_head.weight" not in table.hf_shapes
    assert table.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert ParameterTable(MODELS["llama"]).tied == {}


def test_what_shares_a_global_scale() -> None:
    table = ParameterTable(MODELS["qwen3_moe"])
    assert table[FC1].quantisation_group == FC1
    assert table["decoder.layers.0.self_attention.linear_qkv.weight"].quantisation_group is not None
    kept = {parameter.role for parameter in table.parameters if parameter.quantisation_group is None}
    assert kept == {Role.EMBEDDING, Role.OUTPUT, Role.NORM, Role.ROUTER}


def test_names_of_transformer_engine() -> None:
    local, engine = (ParameterTable(MODELS["qwen3_moe"], **names) for names in ({}, {"naming": TRANSFORMER_ENGINE}))
    assert engine.hf_specs(torch.bfloat16) == local.hf_specs(torch.bfloat16)
    by_hf = {tensor.name: parameter.name for parameter in engine.parameters for tensor in parameter.hf}
    assert by_hf["model.layers.0.input_layernorm.weight"] == "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert by_hf["model.layers.0.post_attention_layernorm.weight"] == "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    assert by_hf["model.layers.1.post_attention_layernorm.weight"] == "decoder.layers.1.pre_mlp_layernorm.weight"
    assert by_hf["model.layers.1.mlp.experts.5.up_proj.weight"] == "decoder.layers.1.mlp.experts.linear_fc1.weight5"


def test_wrong_names_get_a_hint() -> None:
    table = ParameterTable(MODELS["qwen3"])
    with pytest.raises(TensorMismatchError, match="nearest expected: 'decoder.layers.1.mlp.linear_fc1.weight'"):
        table["decoder.layers.1.mlp.linear_fc1.wieght"]
    with pytest.raises(TensorMismatchError, match="'model.norm.weight'"):
        table.by_hf_name("model.norm.bias")


def test_wrong_shapes_are_refused() -> None:
    parameter = ParameterTable(MODELS["qwen3_moe"])[FC1]
    gate, up = (tensor.name for tensor in parameter.hf)
    with pytest.raises(TensorMismatchError, match="up_proj.weight is missing"):
        parameter.from_hf({gate: torch.zeros(28, 24)})
    with pytest.raises(TensorMismatchError, match=r"has shape \[24, 28\], expected \[28, 24\]"):
        parameter.from_hf({gate: torch.zeros(28, 24), up: torch.zeros(24, 28)})
    with pytest.raises(TensorMismatchError, match=r"full tensor has shape \[24, 56\]"):
        parameter.to_hf(torch.zeros(24, 56))
    with pytest.raises(TensorMismatchError, match="shard 1 of 2"):
        parameter.unshard([torch.zeros(28, 24), torch.zeros(28, 23)])
