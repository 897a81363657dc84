"""Who orthogonalises what: every matrix once, by a rank that holds a piece of it, and no rank much more than the others."""

from collections import Counter

import pytest

from megatron_rl.optim import loads_of, plan_rounds, stage_tasks
from megatron_rl.topology import Layout
from tests.unit.optim.subject import DEMO, PUBLISHED, SMALL, placed

LAYOUTS = [
    Layout(4),
    Layout(4, tp=2, ep=2),
    Layout(8, tp=2, pp=2, ep=2),
    Layout(8, tp=4, etp=2, ep=2),
    Layout(8, pp=2, vpp=2, ep=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3_moe"])
def test_every_matrix_has_one_owner_that_holds_a_piece(model: str, layout: Layout) -> None:
    placement = placed(SMALL[model], layout)
    counted: Counter[str] = Counter()
    for stage in range(layout.pp):
        for each in plan_rounds(stage_tasks(placement, stage, 5), layout.ranks_per_stage, 2000):
            for task, owner in zip(each.tasks, each.owners, strict=True):
                counted[task.parameter.name] += 1
                held = {h.parameter.name for h in placement.held_by(stage * layout.ranks_per_stage + owner).values()}
                assert task.parameter.name in held
    wanted = [p.name for p in placement.table.parameters if p.role.has_matrices]
    assert counted == Counter(wanted)


def test_rounds_are_whole_layers_in_order() -> None:
    placement = placed(SMALL["qwen3_moe"], Layout(4))
    rounds = plan_rounds(stage_tasks(placement, 0, 5), 4, 1)
    layers = [{task.parameter.layer for task in each.tasks} for each in rounds]
    assert layers == [{0}, {1}, {2}, {3}]


def test_the_rest_is_not_muons() -> None:
    placement = placed(SMALL["deepseek_v3_moe"], Layout(1))
    names = {task.parameter.name for task in stage_tasks(placement, 0, 5)}
    assert not any(word in name for name in names for word in ("embedding", "output_layer", "router", "norm", "bias"))
    assert any("linear_kv_down_proj" in name for name in names) and any("shared_experts" in name for name in names)


@pytest.mark.parametrize(
    "config", [PUBLISHED["Qwen3-235B-A22B"], PUBLISHED["Kimi-K2"], DEMO], ids=["Qwen3-235B", "Kimi-K2", "demo"]
)
def test_at_four_replicas_the_busiest_rank_is_close_to_the_mean(config: dict) -> None:
    loads = loads_of(plan_rounds(stage_tasks(placed(config, Layout(4)), 0, 5), 4, 128 * 2**20), 4)
    assert max(loads) <= 1.15 * sum(loads) / 4
