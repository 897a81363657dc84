"""Which matrices are quantised, and which requests are refused."""

import json

import pytest

from megatron_rl.precision import QuantisationError, Selection
from megatron_rl.precision.selection import matches
from megatron_rl.weight_mapping import ParameterTable
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
