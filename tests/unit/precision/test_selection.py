"""Which matrices are quantised, and which requests are refused."""

import json

import pytest

from megatron_rl.config.sections import Precision
from megatron_rl.precision import QuantisationError, Selection, check_shards, selection_of
from megatron_rl.precision.selection import matches
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement
from tests.architecture.source import REPOSITORY

PUBLISHED = json.loads((REPOSITORY / "tests/data/published_configs.json").read_text())


def table_of(model_type: str) -> ParameterTable:
    configs = PUBLISHED.values() if isinstance(PUBLISHED, dict) else PUBLISHED
    found = [entry.get("config", entry) for entry in configs]
    return ParameterTable(next(config for config in found if config.get("model_type") == model_type))


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.1.self_attn.q_proj", "model.layers.1", True),
        ("model.layers.10.self_attn.q_proj", "model.layers.1", False),
        ("model.layers.10.self_attn.q_proj", "model.layers.1*", True),
        ("model.layers.10.self_attn.q_proj", "model.layers.*.self_attn", True),
        ("model.layers.10.mlp.gate_proj", "model.layers.10.mlp.gate", False),
        ("model.layers.10.mlp.gate_proj", "*.mlp", False),
    ],
)
def test_patterns_match_whole_segments(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


def test_embeddings_routers_norms_and_output_are_never_quantised() -> None:
    selection = Selection(table_of("qwen3_moe"))
    assert selection.group_of and not [
        name
        for name in selection.group_of
        if "norm" in name or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight")
    ]


def test_fused_matrices_share_a_group() -> None:
    group = Selection(table_of("qwen3_moe")).group_of
    layer = "model.layers.3."
    assert len({group[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"}) == 1
    assert group[f"{layer}mlp.experts.5.gate_proj.weight"] == group[f"{layer}mlp.experts.5.up_proj.weight"]
    assert group[f"{layer}mlp.experts.5.gate_proj.weight"] != group[f"{layer}mlp.experts.6.gate_proj.weight"]


def test_a_module_word_leaves_the_others_out() -> None:
    names = Selection(table_of("qwen3_moe"), ["experts"]).group_of
    assert names and all(".mlp.experts." in name for name in names)


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["model.layers.0.self_attn.q_proj"], "servers fuse"),
        (["model.layers.0.mlp.experts.3"], "servers fuse"),
        (["model.layer.0"], "matches no module"),
    ],
)
def test_what_a_server_cannot_do_is_refused(exclude: list[str], message: str) -> None:
    with pytest.raises(QuantisationError, match=message):
        Selection(table_of("qwen3_moe"), exclude=exclude)


def test_stacked_experts_are_refused_and_can_be_excluded() -> None:
    with pytest.raises(QuantisationError, match="GPT-OSS"):
        Selection(table_of("gpt_oss"))
    assert Selection(table_of("gpt_oss"), ["attention"]).group_of


SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "tensor", "refused"),
    [
        ({"training": "qat"}, 2, None),
        ({"training": "qat"}, 4, "linear_fc2.weight: 96 inputs over 4 ranks are 24 per rank, not a multiple of 16"),
        ({"training": "native"}, 1, None),
        ({"training": "native"}, 2, "linear_fc2.weight: 96 inputs over 2 ranks are 48 per rank, not a multiple of 32"),
        ({"training": "native", "backward": "nvfp4"}, 1, None),
        (
            {"training": "native", "backward": "nvfp4"},
            4,
            "linear_fc1.weight: 192 outputs over 4 ranks are 48 per rank, not a multiple of 32",
        ),
    ],
)
def test_shards_have_the_sizes_that_their_products_take(section: dict, tensor: int, refused: str | None) -> None:
    layout = Layout(world_size=tensor, tp=tensor)
    precision, table = Precision.model_validate({**section, "rollouts": "nvfp4"}), ParameterTable(SMALL)
    selection = selection_of(precision, table)
    held = [h for h in Placement(table, layout).held_by(0).values() if h.parameter.name in selection.names]
    assert held
    if refused is None:
        check_shards(precision, held)
        return
    with pytest.raises(QuantisationError, match=refused):
        check_shards(precision, held)
