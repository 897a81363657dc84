"""The small copy has the features of the published models and of their layouts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.planner.measure import MEASURED_SIZES
from megatron_rl.preflight.shrink import CHECK_SIZES, shrunk_config, shrunk_layout, with_expert_replicas
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import GroupedQueryAttention, ModelArchitecture, ParameterTable, Placement
from megatron_rl.weight_mapping.shrink import shrink_model

ROOT = Path(__file__).parents[3]
PUBLISHED = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())


def features(model: ModelArchitecture) -> dict[str, object]:
    attention, moe = model.attention, model.moe
    found = {
        "attention": type(attention), "rope": model.rope.kind, "rotary share": model.rope.fraction,
        "tied": model.tie_word_embeddings,
        "biases": model.linear_biases, "clamp": model.swiglu_limit, "norm": model.norm_eps,
        "dense layers": bool(model.dense_layers),
        "leading dense": 0 in model.dense_layers,
    }  # fmt: skip
    if isinstance(attention, GroupedQueryAttention):
        shares = attention.num_heads > attention.num_query_groups
        found |= {
            "heads share": shares,
            "norms": attention.qk_norm,
            "bias": attention.qkv_bias,
            "sinks": attention.sinks,
            "window": bool(attention.windowed_layers),
        }
    else:
        found["low-rank q"] = attention.q_lora_rank is not None
    if moe:
        found |= {
            "scoring": moe.scoring, "normalised": moe.normalize_top_k, "bias of choice": moe.selection_bias,
            "scale": moe.scaling_factor,
            "shared": moe.shared_ffn_hidden_size > 0, "groups": moe.num_groups > 1,
        }  # fmt: skip
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_keeps_its_features_and_fits_its_small_layout(name: str) -> None:
    original, config = PUBLISHED[name]["config"], load_config(ROOT / "model_configs" / f"{name.lower()}.toml")
    layout = shrunk_layout(config.parallel_layout)
    small = shrink_model(original, CHECK_SIZES, tensor_parallel=config.layout.tensor)
    table = ParameterTable(small, padded_vocab_size=layout.padded_vocab_size(small["vocab_size"]))
    assert features(table.architecture) == features(ParameterTable(original).architecture)
    Placement(table, layout)
    assert layout.world_size <= 8 and table.num_parameters < 2_000_000
    assert shrunk_config(config, small, layout).parallel_layout == layout


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_that_the_planner_measures_has_the_planner_s_sizes(name: str) -> None:
    original = PUBLISHED[name]["config"]
    model, small = (
        ParameterTable(c).architecture for c in (original, shrink_model(original, MEASURED_SIZES, tensor_parallel=64))
    )
    assert (small.vocab_size, small.hidden_size, small.num_layers, small.attention.num_heads) == (2048, 256, 4, 8)
    assert type(small.attention) is type(model.attention)
    if isinstance(small.attention, GroupedQueryAttention):
        assert (small.attention.num_query_groups, small.attention.head_dim) == (4, 32)
    assert (small.moe.num_experts, small.moe.top_k, small.moe.num_groups) == (8, 2, 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_matrix_is_square(name: str) -> None:
    small = shrink_model(PUBLISHED[name]["config"], CHECK_SIZES)
    square = [name for name, shape in ParameterTable(small).hf_shapes.items() if len(shape) > 1 and shape[-1] == shape[-2]]
    assert not square


@pytest.mark.parametrize(
    ("given", "small"),
    [
        (Layout(1), Layout(1)),
        (Layout(64, tp=8, ep=8), Layout(4, tp=2, ep=2)),
        (
            Layout(512, tp=4, pp=16, ep=16, first_stage_layers=3, last_stage_layers=2),
            Layout(8, tp=2, pp=2, ep=2, first_stage_layers=1, last_stage_layers=3),
        ),
        (Layout(32, tp=4, pp=4, ep=4, etp=2, vpp=3), Layout(8, tp=2, pp=2, ep=2, etp=2, vpp=2)),
        (Layout(64, tp=4, cp=4, pp=4), Layout(8, tp=2, cp=2, pp=2)),
        (Layout(4, tp=4, ep=2, etp=2), Layout(4, tp=2, ep=2, etp=2)),  # one data-parallel rank more than given
    ],
    ids=str,
)
def test_sizes_above_one_become_two(given: Layout, small: Layout) -> None:
    assert shrunk_layout(given) == small


@pytest.mark.parametrize("layout", [Layout(2, ep=2), Layout(8, tp=2, pp=2, ep=2, etp=2), Layout(1), Layout(4, ep=2)], ids=str)
def test_replicas_of_experts_are_made(layout: Layout) -> None:
    wide = with_expert_replicas(layout)
    assert wide.edp == 2 and wide.world_size <= 8
    assert replace(wide, world_size=layout.world_size, pp=layout.pp) == layout
