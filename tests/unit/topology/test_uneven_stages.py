"""Pipelines whose first or last stage has a size of its own. That Megatron cuts alike is shown in
tests/distributed/weight_mapping."""

import pytest

from megatron_rl.topology import Layout, LayoutError

SIZES = {"num_heads": 8, "num_query_groups": 8, "hidden_size": 8, "num_experts": 8}


@pytest.mark.parametrize(
    ("num_layers", "pp", "first", "last", "sizes"),
    [
        (61, 16, 3, 2, [3, *[4] * 14, 2]),
        (94, 8, 11, 11, [11, *[12] * 6, 11]),
        (10, 3, None, 2, [4, 4, 2]),
        (10, 3, 2, None, [2, 4, 4]),
        (5, 2, 2, 3, [2, 3]),
    ],
)
def test_layers_follow_one_another(num_layers: int, pp: int, first: int | None, last: int | None, sizes: list[int]) -> None:
    layout = Layout(world_size=pp, pp=pp, first_stage_layers=first, last_stage_layers=last)
    layout.check_model(num_layers=num_layers, **SIZES)
    stages = [layout.layers_of_stage(num_layers, stage) for stage in range(pp)]
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize(("first", "last"), [(None, None), (12, 12), (94, None), (2, 4)])
def test_what_does_not_come_out_even_is_refused(first: int | None, last: int | None) -> None:
    with pytest.raises(LayoutError, match="num_layers = 95"):
        Layout(world_size=8, pp=8, first_stage_layers=first, last_stage_layers=last).check_model(num_layers=95, **SIZES)


def test_two_stages_have_to_add_up() -> None:
    with pytest.raises(LayoutError, match="num_layers = 6"):
        Layout(world_size=2, pp=2, first_stage_layers=2, last_stage_layers=3).check_model(num_layers=6, **SIZES)


@pytest.mark.parametrize("sizes", [{"pp": 1}, {"pp": 2, "vpp": 2}])
def test_only_a_plain_pipeline_can_be_uneven(sizes: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="pp > 1 and vpp = 1"):
        Layout(world_size=sizes["pp"], first_stage_layers=3, **sizes)


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(LayoutError, match="every stage has at least one"):
        Layout(world_size=2, pp=2, last_stage_layers=0)
