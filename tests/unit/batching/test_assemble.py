"""Microbatches against a slow, token by token reading of the same rollouts; what does not fit its plan is refused."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from megatron_rl.batching import (
    AssemblyOptions,
    Microbatch,
    Spool,
    SupervisedExample,
    SupervisedPlan,
    microbatches_for,
    supervised_microbatches,
)
from megatron_rl.records import ContractError, PayloadError, PlanEntry, Sampling, StepPlan, write_payload
from megatron_rl.topology import Layout
from tests.unit.records.random_rollouts import CONTRACT, make_rollout, with_array, with_kept_id

STEP = 6
OPTIONS = AssemblyOptions(contract=CONTRACT, max_tokens=40, moe_layers=(0, 1, 2))


@pytest.fixture
def spool(tmp_path):
    spool = Spool(tmp_path)
    spool.create()
    return spool


def spooled(spool, rollouts, uid="g000000"):
    """Write the rollouts as one group's payload; their plan entries, of advantages .5, -1.5, 2.5, ..."""
    name = spool.payload_name(uid)
    write_payload(spool.path(name), rollouts)
    return [
        PlanEntry(r.uid, 0, name, i, r.num_tokens, int(r.loss_mask.sum()), (i + 0.5) * (-1) ** i) for i, r in enumerate(rollouts)
    ]


def random_step(spool, count=9, **options):
    rng = np.random.default_rng(21)
    rollouts, entries = [], []
    for group in range(3):
        members = [
            make_rollout(
                rng,
                f"g{group:06d}.{i}",
                num_prompt=int(rng.integers(1, 9)),
                num_completion=int(rng.integers(4, 15)),
                tool_tokens=(1, 2) if i % 2 else (),
                **options,
            )
            for i in range(count // 3)
        ]
        entries += spooled(spool, members, f"g{group:06d}")
        rollouts += members
    return rollouts, StepPlan(STEP, tuple(entries))


def microbatches_of_all(plan, spool, layout, options=OPTIONS):
    """[data-parallel rank][microbatch], with the routes of all its ranks put together."""
    replicas = []
    for number in range(layout.dp):
        of_rank = [r for r in range(layout.world_size) if (c := layout.coords_of(r)).dp == number and c.pp == 0]
        read = [microbatches_for(plan, spool, layout, layout.coords_of(rank), options) for rank in of_rank]
        replicas.append([put_together(parts) for parts in zip(*read, strict=True)])
    return replicas


def put_together(parts):
    """One microbatch, as the ranks of a replica hold it; where two hold a row, it is the same."""
    first = parts[0]
    if first.routed_experts is None:
        return first
    routes = np.zeros((first.num_positions, *first.routed_experts.shape[1:]), dtype=first.routed_experts.dtype)
    mask, count = np.zeros(first.num_positions, dtype=bool), np.zeros(first.num_positions, dtype=int)
    for part in parts:
        seen = count[part.route_positions] > 0
        np.testing.assert_array_equal(routes[part.route_positions][seen], part.routed_experts[seen])
        routes[part.route_positions], mask[part.route_positions] = part.routed_experts, part.route_mask
        count[part.route_positions] += 1
    assert (count == count[0]).all() and count[0] > 0
    return replace(first, routed_experts=routes, route_mask=mask, route_positions=np.arange(first.num_positions))


def check_slowly(m: Microbatch, rollouts, plan, options):
    """Every position of a microbatch by the definitions of the record, one at a time."""
    covered = np.zeros(m.num_positions, dtype=bool)
    for number in sorted(set(m.sequence.tolist()) - {-1}):
        r = rollouts[number]
        places = np.flatnonzero(m.sequence == number)
        assert places.tolist() == list(range(places[0], places[0] + r.num_tokens))  # whole and in one piece
        assert places[0] in m.segment_ends
        covered[places] = True
        tokens = [*r.prompt_ids, *r.completion_ids]
        for i, place in enumerate(places):
            assert m.tokens[place] == tokens[i] and m.positions[place] == i
            c = i + 1 - len(r.prompt_ids)  # the completion token that this position predicts
            if 0 <= c < len(r.completion_ids) and r.loss_mask[c]:
                assert m.loss_mask[place] and m.targets[place] == r.completion_ids[c] and m.completion_index[place] == c
                assert m.rollout_logprobs[place] == r.logprobs[c] and m.staleness[place] == STEP - r.policy_versions[c]
                assert m.temperature[place] == np.float32(r.sampling.temperature)
                assert m.advantages[place] == np.float32(plan.entries[number].advantage)
                kept = r.keep_sets[c] if options.keep_set_replay else []
                assert m.full_rows[place] == (len(kept) == 0)
                assert m.singleton[place] == (len(r.keep_sets[c]) == 1)
            else:
                kept = []
                assert_no_loss(m, place)
            assert m.keep_sets[place].tolist() == list(kept)
            if options.replays_routes:
                assert m.route_mask[place] == (i < r.num_tokens - 1)
                if m.route_mask[place]:
                    assert (m.routed_experts[place] == r.routed_experts[i][list(options.moe_layers)]).all()
    for place in np.flatnonzero(~covered):
        assert m.sequence[place] == -1 and m.tokens[place] == 0
        assert len(m.keep_sets[place]) == 0
        assert m.route_mask is None or not m.route_mask[place]
        assert_no_loss(m, place)
    assert m.num_padding == (~covered).sum()
    assert m.route_mask is None or (m.routed_experts[~m.route_mask] >= CONTRACT.num_experts).all()  # no expert, not expert 0


def assert_no_loss(m, place):
    assert not m.loss_mask[place] and not m.full_rows[place] and not m.singleton[place]
    assert (m.targets[place], m.rollout_logprobs[place], m.advantages[place], m.staleness[place]) == (0, 0, 0, 0)
    assert m.temperature[place] == 1 and m.completion_index[place] == -1


LAYOUTS = [
    (Layout(), False),
    (Layout(world_size=3, ep=3), False),
    (Layout(world_size=4, tp=4), True),
    (Layout(world_size=4, cp=2), False),
    (Layout(world_size=12, tp=2, cp=3, ep=2), True),
    (Layout(world_size=4, pp=2, vpp=2), False),
]


@pytest.mark.parametrize(("layout", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("keep_set_replay", [True, False])
def test_every_position_against_the_slow_reading(spool, layout, sequence_parallel, keep_set_replay):
    rollouts, plan = random_step(spool)
    options = replace(OPTIONS, sequence_parallel=sequence_parallel, keep_set_replay=keep_set_replay, moe_layers=(2, 0))
    per_rank = microbatches_of_all(plan, spool, layout, options)
    assert len({len(ms) for ms in per_rank}) == 1 and len(per_rank[0]) % (layout.pp if layout.vpp > 1 else 1) == 0
    everywhere = [m for ms in per_rank for m in ms]
    for m in everywhere:
        check_slowly(m, rollouts, plan, options)
        assert m.segment_ends[0] == 0 and m.segment_ends[-1] == m.num_positions and (np.diff(m.segment_ends) > 0).all()
        assert (np.diff(m.segment_ends) % (2 * layout.cp if layout.cp > 1 else 1) == 0).all()
        assert m.num_positions % (layout.cp * (layout.tp if sequence_parallel else 1)) == 0
        for start, end in pairwise(m.segment_ends):  # padding continues the count, or starts at 0
            assert m.positions[start:end].tolist() == list(range(end - start))
    seen = [n for m in everywhere for n in sorted(set(m.sequence.tolist()) - {-1})]
    assert sorted(seen) == list(range(len(rollouts)))
    assert sum(int(m.loss_mask.sum()) for m in everywhere) == plan.num_loss_tokens


@pytest.mark.parametrize(("layout", "sequence_parallel"), LAYOUTS)
def test_all_ranks_of_a_replica_see_the_same(spool, layout, sequence_parallel):
    """Whatever its stage, tensor or context rank: only the routes differ, by the layers asked for and by the tokens that its
    routers see, which are an equal share of them."""
    _, plan = random_step(spool)
    options = replace(OPTIONS, sequence_parallel=sequence_parallel)
    per_replica = microbatches_of_all(plan, spool, layout, options)
    for rank in range(layout.world_size):
        coords = layout.coords_of(rank)
        mine = microbatches_for(plan, spool, layout, coords, replace(options, moe_layers=(1,)))
        for m, reference in zip(mine, per_replica[coords.dp], strict=True):
            shares = layout.cp * (layout.tp if sequence_parallel else 1)
            assert len(m.route_positions) * shares == m.num_positions and m.routed_experts.base is None
            np.testing.assert_array_equal(m.routed_experts, reference.routed_experts[m.route_positions, 1:2])
            np.testing.assert_array_equal(m.route_mask, reference.route_mask[m.route_positions])
            np.testing.assert_array_equal(m.keep_sets.ids, reference.keep_sets.ids)
            np.testing.assert_array_equal(m.keep_sets.offsets, reference.keep_sets.offsets)
            for name in vars(m):
                if not name.startswith("route") and name != "keep_sets":
                    np.testing.assert_array_equal(getattr(m, name), getattr(reference, name), err_msg=name)


def test_interleaved_stages_get_a_multiple_of_their_number(spool):
    _, plan = random_step(spool)
    roomy = replace(OPTIONS, max_tokens=1000)
    for layout, expected in ((Layout(world_size=3, pp=3), 1), (Layout(world_size=3, pp=3, vpp=2), 3)):
        assert len(microbatches_for(plan, spool, layout, layout.coords_of(0), roomy)) == expected


def test_dtypes_are_those_of_the_record(spool):
    _, plan = random_step(spool)
    (m,) = microbatches_for(plan, spool, Layout(), Layout().coords_of(0), replace(OPTIONS, max_tokens=1000))
    arrays = vars(m) | {"keep_ids": m.keep_sets.ids, "keep_offsets": m.keep_sets.offsets}
    dtypes = {name: str(array.dtype) for name, array in arrays.items() if isinstance(array, np.ndarray)}
    assert dtypes == {
        "tokens": "int64",
        "positions": "int64",
        "segment_ends": "int32",
        "targets": "int64",
        "loss_mask": "bool",
        "keep_ids": "int32",
        "keep_offsets": "int64",
        "full_rows": "bool",
        "singleton": "bool",
        "temperature": "float32",
        "rollout_logprobs": "float32",
        "advantages": "float32",
        "staleness": "int32",
        "sequence": "int32",
        "completion_index": "int32",
        "routed_experts": "uint8",
        "route_mask": "bool",
        "route_positions": "int64",
    }


def test_a_rank_without_sequences_gets_a_microbatch_of_padding(spool):
    rollout = make_rollout(np.random.default_rng(0))
    plan = StepPlan(STEP, tuple(spooled(spool, [rollout])))
    layout = Layout(world_size=6, tp=2, ep=2)
    options = replace(OPTIONS, sequence_parallel=True)
    empty = [ms[0] for ms in microbatches_of_all(plan, spool, layout, options) if not ms[0].loss_mask.any()]
    assert len(empty) == 2
    for m in empty:
        check_slowly(m, [], plan, options)
        assert m.segment_ends.tolist() == [0, 2] and m.num_padding == 2 and m.routed_experts.shape == (2, 3, 2)


def test_without_routing_replay_no_routes_are_read(spool):
    rollouts, plan = random_step(spool)
    plan_without_routes = StepPlan(STEP, tuple(spooled(spool, [with_array(r, "routed_experts", 0, 99) for r in rollouts[:3]])))
    options = replace(OPTIONS, routing_replay=False)
    for m in microbatches_for(plan_without_routes, spool, Layout(), Layout().coords_of(0), options):
        assert m.routed_experts is None and m.route_mask is None
    dense = replace(OPTIONS, contract=replace(CONTRACT, moe_layers=()), moe_layers=())
    assert microbatches_for(plan, spool, Layout(), Layout().coords_of(0), dense)[0].routed_experts is None


def test_a_stage_without_moe_layers_gets_empty_routes(spool):
    _, plan = random_step(spool)
    for m in microbatches_for(plan, spool, Layout(), Layout().coords_of(0), replace(OPTIONS, moe_layers=())):
        assert m.routed_experts.shape == (m.num_positions, 0, 2)


def test_untruncated_tokens_are_full_rows_also_with_replay(spool):
    _, plan = random_step(spool, sampling=Sampling())
    for m in microbatches_for(plan, spool, Layout(), Layout().coords_of(0), OPTIONS):
        np.testing.assert_array_equal(m.full_rows, m.loss_mask)
        assert len(m.keep_sets.ids) == 0


def test_256_experts_leave_no_byte_for_no_expert():
    """With 256 experts 255 is one of them: the routes are then uint16, so that the fill value is none."""
    assert replace(OPTIONS, contract=replace(CONTRACT, num_experts=255)).route_dtype is np.uint8
    assert replace(OPTIONS, contract=replace(CONTRACT, num_experts=256)).route_dtype is np.uint16


def one(spool, rollout, step=STEP, options=OPTIONS, **changed):
    (entry,) = spooled(spool, [rollout])
    plan = StepPlan(step, (replace(entry, **changed),))
    return microbatches_for(plan, spool, Layout(), Layout().coords_of(0), options)


def test_a_record_that_is_not_what_the_plan_says_is_refused(spool):
    rollout = make_rollout(np.random.default_rng(0))
    for changed in (
        {"uid": "g000000.1"},
        {"num_tokens": 9},
        {"num_loss_tokens": 5},
        {"index": 1},
        {"file": "rollouts/absent.safetensors"},
    ):
        with pytest.raises(PayloadError, match=r"\.safetensors"):
            one(spool, rollout, **changed)


def test_a_record_that_breaks_its_contract_is_refused(spool):
    rollout = make_rollout(np.random.default_rng(0))
    with pytest.raises(ContractError, match="keep-set id 50"):
        one(spool, with_kept_id(rollout, 0, 50))
    with pytest.raises(ContractError, match="expert 9"):
        one(spool, with_array(rollout, "routed_experts", (0, 1, 0), 9))
    # Only what this rank reads is checked: the rank that owns the layer refuses it.
    one(spool, with_array(rollout, "routed_experts", (0, 1, 0), 9), options=replace(OPTIONS, moe_layers=(0, 2)))


def test_a_token_newer_than_its_step_is_refused(spool):
    rollout = make_rollout(np.random.default_rng(0), version=6)  # from the middle on it is of version 7
    with pytest.raises(ContractError, match="token 3: found policy version 7"):
        one(spool, rollout, step=6)
    (m,) = one(spool, rollout, step=7)
    assert m.staleness[m.loss_mask].tolist() == [1, 1, 1, 0, 0, 0]


def supervised(rng, count=5):
    def ids(most):
        return tuple(rng.integers(0, 50, int(rng.integers(1, most))).tolist())

    return SupervisedPlan(4, tuple(SupervisedExample(ids(9), ids(12)) for _ in range(count)))


def test_supervised_microbatches_have_the_loss_on_the_solutions():
    plan = supervised(np.random.default_rng(3), count=7)
    layout = Layout(world_size=6, tp=2, ep=2)
    seen = 0
    for rank in (0, 2, 4):
        for m in supervised_microbatches(plan, layout, layout.coords_of(rank), replace(OPTIONS, sequence_parallel=True)):
            assert m.routed_experts is None and len(m.keep_sets.ids) == 0 and m.num_positions % 2 == 0
            np.testing.assert_array_equal(m.full_rows, m.loss_mask)
            for number in set(m.sequence.tolist()) - {-1}:
                example = plan.examples[number]
                of_it = m.sequence == number
                assert m.tokens[of_it].tolist() == [*example.prompt_ids, *example.solution_ids]
                assert m.targets[of_it & m.loss_mask].tolist() == list(example.solution_ids)
                seen += len(example.solution_ids)
    assert seen == plan.num_loss_tokens


def test_supervised_examples_keep_their_contract_too():
    layout = Layout()
    for example in (SupervisedExample((), (1,)), SupervisedExample((1,), ()), SupervisedExample((1,), (50,))):
        with pytest.raises(ContractError, match=r"supervised000004\.0"):
            supervised_microbatches(SupervisedPlan(4, (example,)), layout, layout.coords_of(0), OPTIONS)
