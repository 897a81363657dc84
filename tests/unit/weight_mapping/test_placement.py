"""Which rank holds what. That Megatron itself builds these names and shapes is proved in tests/distributed/weight_mapping."""

import json
from pathlib import Path

import pytest

from megatron_rl.topology import Layout, LayoutError
from megatron_rl.weight_mapping import TRANSFORMER_ENGINE, ParameterTable, Placement

MODELS = json.loads((Path(__file__).parents[2] / "data" / "small_models.json").read_text())
LAYOUTS = [
    Layout(),
    Layout(world_size=4, tp=2, pp=2),
    Layout(world_size=8, tp=2, pp=2, ep=2, vpp=2),
    Layout(world_size=8, tp=4, ep=2, etp=2),
    Layout(world_size=8, tp=2, cp=2, ep=4),
]


def place(model: str, layout: Layout, **options) -> Placement:
    padded = layout.padded_vocab_size(MODELS[model]["vocab_size"])
    return Placement(ParameterTable(MODELS[model], padded_vocab_size=padded, **options), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_owners_hold_all_shards_in_order(layout: Layout) -> None:
    placement = place("qwen3_moe", layout)
    held = [placement.held_by(rank).values() for rank in range(layout.world_size)]
    for parameter in placement.table.parameters:
        owners = placement.owners(parameter)
        mine = [next(entry for entry in held[rank] if entry.parameter is parameter) for rank in owners]
        assert [entry.shard_rank for entry in mine] == list(range(len(owners)))
        assert all(entry.num_shards == len(owners) for entry in mine)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_holds_its_share_and_no_more(layout: Layout) -> None:
    placement = place("qwen3_moe", layout)
    held = [entry for rank in range(layout.world_size) for entry in placement.held_by(rank).values()]
    for parameter in placement.table.parameters:
        shards = [entry.shard_rank for entry in held if entry.parameter is parameter]
        replicas = layout.edp if parameter.is_expert else layout.dp * layout.cp
        assert sorted(shards) == sorted(list(range(layout.etp if parameter.is_expert else layout.tp)) * replicas)


def test_layers_and_experts_are_numbered_locally() -> None:
    placement = place("qwen3_moe", Layout(world_size=4, pp=2, ep=2))
    held = placement.held_by(3)  # second stage (layers 2, 3), second half of 8 experts
    name = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    assert held[0, name].parameter.name == "decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight"
    assert (0, "embedding.word_embeddings.weight") not in held
    assert (0, "output_layer.weight") in held


def test_interleaved_stages_number_within_their_chunk() -> None:
    placement = place("qwen3_moe", Layout(world_size=2, pp=2, vpp=2))
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    layers = {(rank, chunk): placement.held_by(rank)[chunk, name].parameter.layer for rank in (0, 1) for chunk in (0, 1)}
    assert layers == {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}
    assert (0, "decoder.final_layernorm.weight") not in placement.held_by(1)
    assert (1, "decoder.final_layernorm.weight") in placement.held_by(1)


def test_grouped_experts_are_numbered_locally() -> None:
    held = place("qwen3_moe", Layout(world_size=2, ep=2), naming=TRANSFORMER_ENGINE).held_by(1)
    assert held[0, "decoder.layers.1.mlp.experts.linear_fc1.weight3"].parameter.expert == 7


def test_tied_output_layer_is_a_copy_on_the_last_stage_only() -> None:
    placement = place("qwen3_moe_tied", Layout(world_size=2, pp=2))
    copy = placement.held_by(1)[0, "output_layer.weight"]
    assert copy.is_tied_copy
    assert copy.parameter.name == "embedding.word_embeddings.weight"
    assert placement.owners(copy.parameter) == (0,)
    assert (0, "output_layer.weight") not in place("qwen3_moe_tied", Layout()).held_by(0)


def test_shapes_on_a_rank() -> None:
    held = place("qwen3_moe", Layout(world_size=4, tp=4, ep=2, etp=2)).held_by(0)
    shapes = {name: entry.shape for (_, name), entry in held.items()}
    assert shapes["embedding.word_embeddings.weight"] == (26, 24)  # 103 rows, padded to 104
    assert shapes["decoder.layers.0.self_attention.linear_qkv.weight"] == (30, 24)
    assert shapes["decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"] == (28, 24)
    assert shapes["decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"] == (24, 14)


def test_all_that_does_not_divide_is_named_at_once() -> None:
    table = ParameterTable(MODELS["qwen3_moe"], padded_vocab_size=103)
    with pytest.raises(LayoutError) as caught:
        Placement(table, Layout(world_size=18, tp=3, pp=3, ep=2, etp=3))
    message = str(caught.value)
    assert all(word in message for word in ("num_layers = 4", "8 heads", "103 along dimension 0", "28 along dimension 0", "40 "))
