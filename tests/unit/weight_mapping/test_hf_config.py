"""Reading a Hugging Face config: what is understood, and that nothing else passes unnoticed."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.weight_mapping import (
    GroupedQueryAttention,
    MixtureOfExperts,
    ModelArchitecture,
    Rope,
    UnknownFamilyError,
    UnsupportedArchitectureError,
    family_of,
)

MODELS = json.loads((Path(__file__).parents[2] / "data" / "small_models.json").read_text())


def read(name: str, **changes: Any) -> ModelArchitecture:
    config = {**MODELS[name], **changes}
    return family_of(config).architecture(config)


def read_any(name: str, **changes: Any) -> ModelArchitecture:
    families = json.loads((Path(__file__).parents[2] / "data" / "small_families.json").read_text())
    config = {**(MODELS | families)[name], **changes}
    return family_of(config).architecture(config)


def test_every_field_of_a_qwen3_moe() -> None:
    assert read("qwen3_moe") == ModelArchitecture(
        model_type="qwen3_moe",
        num_layers=4,
        hidden_size=24,
        vocab_size=103,
        ffn_hidden_size=40,
        attention=GroupedQueryAttention(num_heads=8, num_query_groups=2, head_dim=10, qk_norm=True),
        moe=MixtureOfExperts(num_experts=8, top_k=3, ffn_hidden_size=28, layers=(1, 3), normalize_top_k=True),
        rope=Rope(theta=50000.0),
        norm_eps=1e-5,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        initializer_range=0.02,
    )


def test_sparse_step_counts_from_one() -> None:
    assert read("qwen3_moe_tied").moe_layers == (1, 3)
    assert read("qwen3_moe_tied").moe_layer_freq == [0, 1, 0, 1]
    assert read("qwen3_moe_tied").dense_layers == (0, 2)
    assert read("qwen3_moe", decoder_sparse_step=3, mlp_only_layers=[]).moe_layers == (2,)


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}, (0, 1, 2, 3)),
        ("qwen3_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ("mixtral_moe", {"num_hidden_layers": 3}, (0, 1, 2)),
        ("deepseek_v3_moe", {"num_hidden_layers": 5, "first_k_dense_replace": 2}, (2, 3, 4)),
        ("llama", {"num_hidden_layers": 5}, ()),
    ],
)
def test_which_layers_have_experts(name: str, changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    """As transformers builds them; records have routes for these layers."""
    contract = read_any(name, **changes).contract
    assert contract.moe_layers == layers
    assert (contract.num_experts > 0, contract.experts_per_token > 0) == (bool(layers), bool(layers))


def test_defaults_are_those_of_transformers() -> None:
    assert read("qwen3_moe_tied").moe.normalize_top_k is False
    assert read("llama").attention == GroupedQueryAttention(4, 2, 10, qk_norm=False)
    assert read("llama").moe is None
    config = {key: value for key, value in MODELS["llama"].items() if key != "num_key_value_heads"}
    assert family_of(config).architecture(config).attention.num_query_groups == 4


def test_both_spellings_of_experts_and_rope() -> None:
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in MODELS["qwen3_moe"].items()}
    assert family_of(renamed).architecture(renamed) == read("qwen3_moe")
    parameters = {"rope_theta": 50000.0, "rope_type": "default"}
    assert read("qwen3_moe", rope_theta=None, rope_parameters=parameters) == read("qwen3_moe")


def test_rope_scaling_that_megatron_has() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert read("llama", rope_scaling=llama3).rope == Rope(10000.0, "llama3", 32.0)
    assert read("llama", rope_scaling={"type": "linear", "factor": 2}).rope == Rope(10000.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "original_max_position_embeddings is missing"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "'longrope' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2}}, "low_freq_factor = 2"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 8, "beta": 2}}, "beta = 2: not known"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "contradicts rope_parameters"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one flat table"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama", {"sliding_window": 512}, "sliding_window = 512: this family does not know the key"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0: this family does not know the key"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": "40"}, "must be a positive integer"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "dequantise"),
        ("qwen3", {"use_sliding_window": True}, "sliding-window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention"),
        ("qwen3", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "layer numbers in 0..3"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts = 8"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes' must be true or false"),
    ],
)
def test_what_cannot_be_expressed_is_refused(model: str, change: dict, message: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=message):
        read(model, **change)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UnsupportedArchitectureError) as caught:
        read("llama", mlp_bias=True, hidden_act="relu", logit_scale=0.5)
    assert all(word in str(caught.value) for word in ("mlp_bias", "hidden_act", "logit_scale"))


def test_switched_off_features_are_no_problem() -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "layer_types": ["full_attention"] * 4}
    assert read("qwen3", **off, some_new_switch=False, some_table=None) == read("qwen3")


def test_families_are_found_by_type_or_head() -> None:
    assert family_of({"model_type": "qwen3"}).causal_lm == "Qwen3ForCausalLM"
    assert family_of({"architectures": ["LlamaForCausalLM"]}).model_type == "llama"


@pytest.mark.parametrize(
    "config", [{"model_type": "bert"}, {}, {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}]
)
def test_an_unknown_family_names_the_known_ones(config: dict) -> None:
    with pytest.raises(UnknownFamilyError, match=r"llama \(LlamaForCausalLM\), qwen3 .*, qwen3_moe .*, gpt_oss"):
        family_of(config)
