"""The staleness bound, by cases and by random simulation."""

import json
import random

import pytest

from megatron_rl.orchestrator.buffer import GroupBuffer, RolloutBufferError, oldest_version
from megatron_rl.records import GroupResult, RolloutSummary


def group(prompt_index: int, version: int, newest: int | None = None) -> GroupResult:
    def rollout(k: int) -> RolloutSummary:
        return RolloutSummary(
            uid=f"g{prompt_index}.{k}",
            file=f"g{prompt_index}.safetensors",
            index=k,
            num_prompt_tokens=5,
            num_completion_tokens=7,
            num_loss_tokens=7,
            num_singletons=3,
            num_keep_ids=12,
            num_with_keep_set=7,
            num_with_routes=11,
            reward=1.0,
            finish_reason="stop",
            min_version=version + k,
            max_version=max(version + k, newest or 0),
        )

    return GroupResult(
        uid=f"g{prompt_index}", prompt_index=prompt_index, attempt=0, server="s", rollouts=(rollout(1), rollout(0))
    )


def begin_and_finish(buffer: GroupBuffer, prompt_index: int, version: int) -> None:
    buffer.begin(prompt_index, version)
    buffer.finish(group(prompt_index, version))


@pytest.mark.parametrize(("version", "next_step", "room"), [(0, 0, 6), (0, 1, 3), (1, 1, 6), (0, 2, 0), (1, 3, 0)])
def test_admission_leaves_room_up_to_the_deadline(version, next_step, room):
    """prompts_per_step 3, max_staleness 1: what begins at version v is consumed by step v + 1 at the latest."""
    buffer = GroupBuffer(prompts_per_step=3, max_staleness=1, next_step=next_step)
    assert buffer.admissible(version) == room


def test_admission_counts_what_is_alive_and_the_limit():
    buffer = GroupBuffer(prompts_per_step=4, max_staleness=1)
    buffer.begin(0, 0)
    begin_and_finish(buffer, 1, 0)
    assert buffer.admissible(0) == 8 - 2
    assert buffer.admissible(0, concurrent_groups=3) == 2
    buffer.abandon(0)
    assert buffer.admissible(0) == 7


def test_batch_is_oldest_first_then_prompt_order():
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=3, next_step=1)
    for prompt_index, version in [(7, 1), (3, 1), (9, 0), (1, 1)]:
        begin_and_finish(buffer, prompt_index, version)
    assert [g.prompt_index for g in buffer.take_batch()] == [9, 1]
    assert buffer.next_step == 2


def test_too_few_groups_is_not_yet():
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=0)
    begin_and_finish(buffer, 0, 0)
    assert buffer.take_batch() is None and buffer.next_step == 0


def test_a_step_waits_for_a_group_at_its_deadline():
    """max_staleness 1 at step 1: group 0 (version 0) has to be in this batch; the younger 1 and 2 may not take its place."""
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=1, next_step=1)
    buffer.begin(0, 0)
    begin_and_finish(buffer, 1, 1)
    begin_and_finish(buffer, 2, 1)
    assert buffer.take_batch() is None
    buffer.finish(group(0, 0))
    assert [g.prompt_index for g in buffer.take_batch()] == [0, 1]


def test_a_step_waits_where_the_next_could_not_take_all_that_are_left():
    """max_staleness 2 at step 1: four slow groups of version 0 have to be consumed by step 2, two of them now."""
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=2, next_step=1)
    for prompt_index in range(4):
        buffer.begin(prompt_index, 0)
    begin_and_finish(buffer, 4, 1)
    begin_and_finish(buffer, 5, 1)
    assert buffer.take_batch() is None
    buffer.finish(group(3, 0))
    assert buffer.take_batch() is None
    buffer.finish(group(2, 0))
    assert [g.prompt_index for g in buffer.take_batch()] == [2, 3]


def test_a_slow_group_with_time_left_is_overtaken():
    buffer = GroupBuffer(prompts_per_step=1, max_staleness=2)
    buffer.begin(0, 0)
    begin_and_finish(buffer, 1, 0)
    assert [g.prompt_index for g in buffer.take_batch()] == [1]


def test_no_wait_where_waiting_cannot_help():
    """Everything is too late for someone: the finished groups are as old as the one in flight, so the step does not wait."""
    buffer = GroupBuffer(prompts_per_step=1, max_staleness=1, next_step=1)
    buffer.begin(0, 0)
    begin_and_finish(buffer, 1, 0)
    assert [g.prompt_index for g in buffer.take_batch()] == [1]
    buffer.finish(group(0, 0))
    assert [g.prompt_index for g in buffer.evict_stale()] == [0]
    assert buffer.num_finished == 0


def test_stale_groups_are_never_consumed():
    buffer = GroupBuffer(prompts_per_step=1, max_staleness=1, next_step=2)
    begin_and_finish(buffer, 0, 0)
    with pytest.raises(RolloutBufferError, match="group g0 is 2 versions old at step 2, max_staleness is 1"):
        buffer.take_batch()
    assert [g.uid for g in buffer.evict_stale()] == ["g0"] and buffer.take_batch() is None


def test_bookkeeping_faults_raise():
    buffer = GroupBuffer(prompts_per_step=1, max_staleness=1)
    buffer.begin(0, 0)
    with pytest.raises(RolloutBufferError, match="begun a second time"):
        buffer.begin(0, 0)
    with pytest.raises(RolloutBufferError, match="not in flight"):
        buffer.finish(group(1, 0))
    with pytest.raises(RolloutBufferError, match="has no rollouts"):
        buffer.finish(GroupResult(uid="g0", prompt_index=0, attempt=0, server="s", failure="server"))
    buffer.finish(group(0, 0))
    with pytest.raises(RolloutBufferError, match="begun a second time"):
        buffer.begin(0, 0)


def test_json_keeps_the_finished_groups_and_the_step():
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=3, next_step=5)
    buffer.begin(9, 5)
    for prompt_index in (3, 1, 2):
        begin_and_finish(buffer, prompt_index, 4)
    again = GroupBuffer.from_json(json.loads(json.dumps(buffer.to_json())), prompts_per_step=2, max_staleness=3)
    assert again.num_in_flight == 0 and again.num_finished == 3
    buffer.abandon(9)
    assert again.take_batch() == buffer.take_batch()
    assert again.to_json() == buffer.to_json()


@pytest.mark.parametrize("seed", range(20))
def test_simulated_run_keeps_the_bound_and_discards_nothing(seed):
    """Groups of very uneven duration, updates in flight, failures.

    Every batch is within the bound and nothing grows stale in the buffer.
    """
    rng = random.Random(seed)
    per_step, bound = rng.randint(1, 5), rng.randint(0, 4)
    buffer = GroupBuffer(prompts_per_step=per_step, max_staleness=bound)
    version, cursor, flying, training, ages, now = 0, 0, {}, None, [], 0
    while version < 40:
        now += 1
        for _ in range(buffer.admissible(version)):
            buffer.begin(cursor, version)
            flying[cursor] = (version, now + (rng.randint(1, 4) if rng.random() < 0.8 else rng.randint(20, 60)))
            cursor += 1
        for prompt_index in [i for i, (_, end) in flying.items() if end <= now]:
            begun, _ = flying.pop(prompt_index)
            if rng.random() < 0.1:
                buffer.abandon(prompt_index)
            else:
                buffer.finish(group(prompt_index, begun, newest=version))
        if training is not None and training <= now:
            version, training = version + 1, None
        assert buffer.evict_stale() == []
        if training is None and buffer.next_step == version and (batch := buffer.take_batch()):
            ages += [buffer.next_step - 1 - oldest_version(g) for g in batch]
            training = now + rng.randint(1, 3)
        assert now < 20_000, "the simulated run hangs"
    assert min(ages) >= 0 and max(ages) <= bound
