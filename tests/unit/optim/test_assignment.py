"""Who orthogonalises what: every matrix once, by a rank that holds a piece of it, and no rank much more than the others."""

from collections import Counter

import pytest

from megatron_rl.optim import Piece, assign_rounds, bytes_sent, loads_of, stage_tasks
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
        for each in assign_rounds(stage_tasks(placement, stage, 5), layout.ranks_per_stage, 2000):
            for task, owner in zip(each.tasks, each.owners, strict=True):
                counted[task.parameter.name] += 1
                held = {h.parameter.name for h in placement.held_by(stage * layout.ranks_per_stage + owner).values()}
                assert task.parameter.name in held
    wanted = [p.name for p in placement.table.parameters if p.role.has_matrices]
    assert counted == Counter(wanted)


def test_rounds_are_whole_layers_in_order() -> None:
    placement = placed(SMALL["qwen3_moe"], Layout(4))
    rounds = assign_rounds(stage_tasks(placement, 0, 5), 4, 1)
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
    loads = loads_of(assign_rounds(stage_tasks(placed(config, Layout(4)), 0, 5), 4, 128 * 2**20), 4)
    assert max(loads) <= 1.15 * sum(loads) / 4


def test_many_ranks_wait_for_none() -> None:
    """Rounds as long as with few ranks would give most of the 128 nothing to do while two of them have a layer's attention."""
    layout = Layout(1024, tp=4, pp=8, ep=4, first_stage_layers=11, last_stage_layers=11)
    rounds = assign_rounds(stage_tasks(placed(PUBLISHED["Qwen3-235B-A22B"], layout), 1, 5), 128, 128 * 2**20)
    mean = sum(loads_of(rounds, 128)) / 128
    assert len(rounds) == 2 and sum(max(loads_of([each], 128)) for each in rounds) < 1.1 * mean


def test_bytes_are_those_that_leave_a_rank() -> None:
    """Two replicas, each with half of every parameter: of each parameter one half of the direction goes to the owner, and one
    half of the update comes back."""
    tasks = stage_tasks(placed(SMALL["qwen3"], Layout(2)), 0, 5)
    rounds = assign_rounds(tasks, 2, 1)
    halves = [
        [Piece(t.parameter.name, 0, 1, rank * t.elements // 2, (rank + 1) * t.elements // 2) for t in tasks] for rank in range(2)
    ]
    assert sum(bytes_sent(rounds, halves)) == 2 * 4 * sum(task.elements // 2 for task in tasks)


def test_a_copy_of_a_whole_matrix_sends_nothing_and_gets_the_update() -> None:
    tasks = stage_tasks(placed(SMALL["deepseek_v3_moe"], Layout(2, tp=2)), 0, 5)
    down = [task for task in tasks if task.parameter.name == "decoder.layers.0.self_attention.linear_kv_down_proj.weight"]
    (one,) = assign_rounds(down, 2, 1)
    assert one.owners == (0,)
    copies = [[Piece(down[0].parameter.name, rank, 2, 0, down[0].elements)] for rank in range(2)]
    assert bytes_sent([one], copies) == [4 * down[0].elements, 0]
