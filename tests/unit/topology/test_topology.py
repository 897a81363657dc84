"""Rank arithmetic against a slow enumeration of Megatron's order, tp-cp-ep-dp-pp, and the refusals."""

from contextlib import nullcontext
from itertools import product

import pytest

from megatron_rl.topology import Layout, LayoutError

LAYOUTS = [
    Layout(),
    Layout(world_size=2, ep=2),
    Layout(world_size=8, tp=2, pp=2, ep=2),
    Layout(world_size=16, tp=2, cp=2, pp=2, ep=4, etp=1),
    Layout(world_size=24, tp=2, pp=3, ep=2, etp=2, vpp=2),
    Layout(world_size=12, tp=1, cp=3, pp=2, ep=2, etp=3),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_count_through_the_dimensions_in_order(layout):
    """Dense: pp slowest, then dp, cp, tp. Experts: the same ranks of a stage as edp, ep, etp."""
    dense = product(range(layout.pp), range(layout.dp), range(layout.cp), range(layout.tp))
    experts = product(range(layout.pp), range(layout.edp), range(layout.ep), range(layout.etp))
    for rank, (d, e) in enumerate(zip(dense, experts, strict=True)):
        c = layout.coords_of(rank)
        assert (c.rank, c.pp, c.dp, c.cp, c.tp) == (rank, *d)
        assert (c.pp, c.edp, c.ep, c.etp) == e
    assert rank == layout.world_size - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_multiply_to_the_world(layout):
    assert layout.tp * layout.cp * layout.dp * layout.pp == layout.world_size
    assert layout.etp * layout.ep * layout.edp * layout.pp == layout.world_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layer_expert_and_vocabulary_row_has_one_owner(layout):
    num_layers, num_experts, vocab_size = 12, 24, 101
    layers = [n for p in range(layout.pp) for n in layout.layers_of_stage(num_layers, p)]
    assert sorted(layers) == list(range(num_layers))
    experts = [n for e in range(layout.ep) for n in layout.experts_of(num_experts, e)]
    assert experts == list(range(num_experts))
    rows = [n for t in range(layout.tp) for n in layout.vocab_range(vocab_size, t)]
    assert rows == list(range(layout.padded_vocab_size(vocab_size)))
    assert 0 <= len(rows) - vocab_size < layout.tp


def test_interleaved_stages_take_turns():
    """Two stages of two chunks over eight layers: stage 0 holds 0 1 and 4 5, stage 1 holds 2 3 and 6 7."""
    layout = Layout(world_size=2, pp=2, vpp=2)
    assert layout.layers_of_stage(8, 0) == [0, 1, 4, 5]
    assert layout.layers_of_stage(8, 1) == [2, 3, 6, 7]
    assert list(layout.layers_of_chunk(8, pp_rank=1, chunk=1)) == [6, 7]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp": 0}, "tp = 0"),
        ({"world_size": -1}, "world_size = -1"),
        ({"world_size": 6, "tp": 4}, "use 8 ranks"),
        ({"world_size": 8, "tp": 2, "pp": 2, "ep": 3}, "etp x ep = 1 x 3"),
        ({"world_size": 4, "ep": 2, "etp": 4}, "etp x ep = 4 x 2"),
        ({"world_size": 2, "vpp": 2}, "pp = 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, says):
    with pytest.raises(LayoutError, match=says):
        Layout(**sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_world_are_refused(rank):
    with pytest.raises(LayoutError, match=f"rank {rank}"):
        Layout(world_size=4).coords_of(rank)


def test_a_model_that_does_not_fit_is_refused_with_all_faults_at_once():
    layout = Layout(world_size=16, tp=4, pp=2, ep=8, vpp=2)
    with pytest.raises(LayoutError) as caught:
        layout.check_model(num_layers=6, num_heads=6, num_query_groups=3, hidden_size=10, num_experts=12)
    for fault in ("num_layers = 6", "num_attention_heads = 6", "hidden_size = 10", "num_key_value_heads = 3", "num_experts = 12"):
        assert fault in str(caught.value)


def test_a_dense_model_takes_no_expert_parallelism():
    with pytest.raises(LayoutError, match="no experts"):
        Layout(world_size=2, ep=2).check_model(num_layers=2, num_heads=4, num_query_groups=2, hidden_size=8, num_experts=None)
    Layout(world_size=2, tp=2).check_model(num_layers=2, num_heads=4, num_query_groups=1, hidden_size=8, num_experts=None)


def test_tensor_parallelism_beyond_the_query_groups_fits_when_one_divides_the_other():
    for groups, fits in ((1, True), (2, True), (4, True), (8, True), (3, False), (6, False)):
        with nullcontext() if fits else pytest.raises(LayoutError, match="num_key_value_heads"):
            Layout(world_size=4, tp=4).check_model(
                num_layers=2, num_heads=8, num_query_groups=groups, hidden_size=8, num_experts=None
            )
