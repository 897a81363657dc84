"""The counts are the placement's, which other tests compare with what Megatron builds.

For every published model on its own layout.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.planner import ParameterCounts
from megatron_rl.topology import Layout, LayoutError
from megatron_rl.weight_mapping import ParameterTable, Placement, Role

ROOT = Path(__file__).parents[3]
PUBLISHED = {
    name: entry["config"] for name, entry in json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text()).items()
}
SMALL = {
    name: config
    for file in ("small_models.json", "small_families.json")
    for name, config in json.loads((ROOT / "tests" / "data" / file).read_text()).items()
}
LAYOUTS = [
    Layout(),
    Layout(world_size=4, tp=4),
    Layout(world_size=4, pp=4),
    Layout(world_size=4, pp=2, vpp=2),
    Layout(world_size=3, pp=3, last_stage_layers=2),
    Layout(world_size=4, ep=4),
    Layout(world_size=8, tp=4, etp=2, ep=2),
]


def held_by(placement: Placement, rank: int, chunk: int) -> tuple[int, int, int, int]:
    """(dense elements, experts' elements, matrices, untrained) of one chunk."""
    sums = [0, 0, 0, 0]
    for (number, _), held in placement.held_by(rank).items():
        if number == chunk:
            size, role = math.prod(held.shape), held.parameter.role
            where = 3 if role is Role.SELECTION_BIAS else int(held.parameter.is_expert)
            sums[where] += size
            sums[2] += size if role.has_matrices else 0
    return sums[0], sums[1], sums[2], sums[3]


def counted(counts: ParameterCounts, layout: Layout, stage: int, chunk: int) -> tuple[int, int, int, int]:
    held = counts.chunk(layout, stage, chunk)
    return (
        held.dense.trained + held.tied.trained,
        held.expert.trained,
        held.dense.matrices + held.expert.matrices,
        held.dense.untrained + held.expert.untrained,
    )


def compare(config: dict, layout: Layout, ranks_of_stage: int = 1) -> None:
    counts = ParameterCounts(config)
    placement = Placement(ParameterTable(config, padded_vocab_size=layout.padded_vocab_size(config["vocab_size"])), layout)
    for stage in range(layout.pp):
        for rank in range(stage * layout.ranks_per_stage, stage * layout.ranks_per_stage + ranks_of_stage):
            for chunk in range(layout.vpp):
                assert counted(counts, layout, stage, chunk) == held_by(placement, rank, chunk), (stage, rank, chunk)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_on_every_stage_of_their_layout(name: str) -> None:
    layout = load_config(ROOT / "model_configs" / f"{name.lower()}.toml").parallel_layout
    compare(PUBLISHED[name], replace(layout, world_size=layout.tp * layout.pp * max(1, layout.ep * layout.etp // layout.tp)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_small_models_on_every_rank(name: str, layout: Layout) -> None:
    if ("moe" not in name and layout.ep > 1) or ("gpt_oss" in name and layout.etp > 1):
        pytest.skip("this layout cuts experts that the model has not, or cannot have cut")
    compare(SMALL[name], layout, layout.ranks_per_stage)


def test_the_whole_model() -> None:
    published = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())
    for name, entry in published.items():
        assert ParameterCounts(entry["config"]).num_parameters == entry["parameters_without_mtp"], name


def test_a_cut_that_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(LayoutError, match="12 ranks|not a multiple of ep = 3"):
        ParameterCounts(SMALL["qwen3_moe"]).chunk(Layout(world_size=3, ep=3), 0, 0)
