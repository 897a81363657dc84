"""From finished groups to a plan: advantages within each group, and a summary whose every number is checked by hand."""

import pytest

from megatron_rl.batching import build_probe, build_step, split_step
from megatron_rl.records import GroupResult, RolloutSummary


def summary(uid, reward, *, prompt=3, completion=5, singletons=2, keep_ids=11, kept=5, routed=7, finish="stop", versions=(4, 5)):
    return RolloutSummary(
        uid=uid,
        file=f"rollouts/{uid.split('.')[0]}.safetensors",
        index=int(uid.split(".")[1]),
        num_prompt_tokens=prompt,
        num_completion_tokens=completion,
        num_loss_tokens=completion,
        num_singletons=singletons,
        num_keep_ids=keep_ids,
        num_with_keep_set=kept,
        num_with_routes=routed,
        reward=reward,
        finish_reason=finish,
        min_version=versions[0],
        max_version=versions[1],
    )


def group(number, *rollouts):
    return GroupResult(uid=f"g{number}", prompt_index=10 + number, attempt=0, server="s", rollouts=rollouts)


GROUPS = [
    group(0, summary("g0.0", 1.0), summary("g0.1", 0.0, completion=9, kept=8, routed=11, keep_ids=20, finish="length")),
    group(1, summary("g1.0", 0.5, versions=(2, 6)), summary("g1.1", 0.5)),
]


def test_entries_carry_their_groups_advantages():
    plan = build_step(6, GROUPS, "group_mean")
    assert plan.step == 6
    assert [(e.uid, e.prompt_index, e.advantage) for e in plan.entries] == [
        ("g0.0", 10, 0.5),
        ("g0.1", 10, -0.5),
        ("g1.0", 11, 0.0),
        ("g1.1", 11, 0.0),
    ]
    second = plan.entries[1]
    assert (second.file, second.index, second.num_tokens, second.num_loss_tokens) == ("rollouts/g0.safetensors", 1, 12, 9)
    assert [e.advantage for e in build_step(6, GROUPS, "group_mean_std").entries] == [1.0, -1.0, 0.0, 0.0]


def test_the_summary_by_hand():
    s = build_step(6, GROUPS, "group_mean").summary
    assert s["reward_mean"] == 0.5
    assert s["equal_reward_share"] == 0.5
    assert s["num_loss_tokens"] == 5 + 9 + 5 + 5 == 24
    assert s["num_tokens"] == 24 + 4 * 3
    assert s["num_singletons"] / s["num_loss_tokens"] == 8 / 24
    assert s["keep_set_coverage"] == 23 / 24  # g0.1 lacks one set
    assert s["keep_set_size_mean"] == (11 * 3 + 20) / 23
    assert s["routing_coverage"] == 1.0  # all tokens but each sequence's last: 36 - 4 = 7 + 11 + 7 + 7
    assert s["staleness_mean"] == (2 + 2 + 4 + 2) / 4  # by the oldest token
    assert s["staleness_max"] == 4
    assert (s["completion_tokens_mean"], s["completion_tokens_max"], s["cut_off_share"]) == (6, 9, 0.25)
    assert (s["num_groups"], s["num_rollouts"]) == (2, 4)
    assert all(type(value) is float for value in s.values())  # numpy's scalars would not be written as JSON


def test_a_plan_without_groups():
    plan = build_step(0, [], "group_mean")
    assert plan.entries == () and plan.summary["num_loss_tokens"] == 0


def test_a_probe_is_not_trained_on():
    plan = build_probe(5, GROUPS)
    assert plan.step == 5 and [e.advantage for e in plan.entries] == [0.0] * 4


def test_an_unknown_advantage_is_refused():
    with pytest.raises(KeyError):
        build_step(0, GROUPS, "median")


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_split_in_order_without_loss(parts):
    plan = build_step(6, GROUPS, "group_mean")
    split = split_step(plan, parts)
    assert len(split) == parts
    assert tuple(e for part in split for e in part.entries) == plan.entries
    assert max(len(p.entries) for p in split) - min(len(p.entries) for p in split) <= 1
    assert sum(p.num_loss_tokens for p in split) == plan.num_loss_tokens and {p.step for p in split} == {6}
