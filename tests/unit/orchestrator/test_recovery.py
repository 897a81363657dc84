"""What the orchestrator does after a trainer's death, a stop, a bad disk or a damaged file: nothing is lost, nothing is done twice."""

import asyncio
import errno
import json

import pytest

from megatron_rl.orchestrator import RunFailedError, RunState, restore
from megatron_rl.wire.control import Rendezvous, RendezvousRequest, WorkOrder, WorkRequest
from tests.unit.orchestrator.world import FakeChild, World, config, sampled


def test_a_trainer_that_dies_starts_again_and_does_the_recorded_steps_again(tmp_path, monkeypatch):
    """Killed within step 5, with the latest checkpoint at step 4: nothing else of the run goes back."""
    monkeypatch.setattr(
        "megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2
    )  # the payloads are not this test's matter
    world = World(tmp_path, config(tmp_path))
    asyncio.run(world.run(lambda task: sampled(world, task), killed_at=5))
    assert world.observer.steps == list(range(6))  # each reported once
    assert [plan.step for plan in world.consumed] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert world.consumed[6:] == world.consumed[4:6]
    assert sorted(set(world.versions)) == list(range(6)) and world.versions == sorted(world.versions)  # no server went back
    assert world.saves == [2, 4, 6]
    trained = [e.prompt_index for plan in world.consumed[:6] for e in plan.entries]
    assert len(trained) == 6 * 3 * 2 and len(set(trained)) == 6 * 3 == world.orchestrator.state.ledger.trained_prompts
    assert len(world.servers) == 2 and not world.orchestrator.state.ledger.discarded
    assert any(
        f"the trainer starts again from {world.folder.checkpoint(4)}, up to step 5" in event for event in world.observer.events
    )


def failure_of(world, **kwargs) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(world.run(lambda task: sampled(world, task), **kwargs))
    return str(next(e for e in caught.value.exceptions if isinstance(e, RunFailedError)))


def test_a_trainer_that_dies_at_the_same_step_again_and_again_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    world = World(tmp_path, config(tmp_path))
    world.next_life = {"killed_at": 3}
    failure = failure_of(world, killed_at=3)
    assert "started again 3 times without finishing a step (trainer.max_restarts)" in failure
    assert [plan.step for plan in world.consumed] == [0, 1, 2, 3] + [2, 3] * 3


def test_a_step_that_cannot_be_done_again_is_named(tmp_path):
    world = World(tmp_path, config(tmp_path))  # whose payloads do not exist
    failure = failure_of(world, killed_at=3)
    assert "step 2 cannot be done again: " in failure and "spool/rollouts/g" in failure
    assert "its rollouts have to be sampled again; --resume draws anew from there on" in failure


def test_a_step_whose_plan_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    world = World(tmp_path, config(tmp_path))
    done = world.orchestrator.on_step

    async def forgetful(report):
        world.orchestrator.spool.path("plans/step_000002.json").unlink(missing_ok=True)
        return await done(report)

    monkeypatch.setattr(world.orchestrator, "on_step", forgetful)
    world.http = World.client(world.orchestrator)
    failure = failure_of(world, killed_at=3)
    assert "step 2 cannot be done again: " in failure and "plans/step_000002.json is gone; --resume draws anew" in failure


def test_a_worker_that_dies_is_gone_and_the_others_sample_again_what_it_had_begun(tmp_path):
    world = World(tmp_path, config(tmp_path))
    lost, other = FakeChild("worker-0"), FakeChild("worker-1")

    async def take_and_die():
        tasks = []
        while all(task.probe for task in tasks):
            tasks = (await world.post("/work", WorkRequest("worker-0", slots=2, wait_s=0.2), WorkOrder)).tasks
        lost.status = -9

    async def scenario():
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(world.orchestrator.run([world.trainer, lost, other], world.start_trainer))
            group.create_task(world.train())
            await take_and_die()
            await world.work(lambda task: sampled(world, task))

    asyncio.run(scenario())
    assert world.observer.steps == list(range(6))
    assert any(
        "worker-0 ended with status -9" in event and "2 groups are drawn again" in event for event in world.observer.events
    )
    ledger = world.orchestrator.state.ledger
    ledger.check()
    assert ledger.trained_prompts == 6 * 3 and ledger.discarded["interrupted"] == 2


def test_the_last_worker_ends_the_run(tmp_path):
    world = World(tmp_path, config(tmp_path))
    alone = FakeChild("worker-0")
    alone.status = -9
    with pytest.raises(RunFailedError, match="worker-0 ended with status -9"):
        asyncio.run(world.orchestrator.run([world.trainer, alone], world.start_trainer))


def test_the_ranks_meet_where_the_first_says_and_those_of_the_next_life_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    world = World(tmp_path, config(tmp_path))
    met = []

    async def train(**kwargs):
        asked = asyncio.create_task(world.post("/rendezvous", RendezvousRequest(1, wait_s=5.0), Rendezvous))
        await asyncio.sleep(0.05)
        assert not asked.done()
        await world.post("/rendezvous", RendezvousRequest(0, "10.0.0.1", 4000 + len(met)), Rendezvous)
        met.append(await asked)
        await World.train(world, **kwargs)

    world.train = train
    asyncio.run(world.run(lambda task: sampled(world, task), killed_at=5))
    assert met == [Rendezvous("10.0.0.1", 4000), Rendezvous("10.0.0.1", 4001)]


def test_stopping_saves_and_a_resumed_run_trains_the_rest(tmp_path):
    world = World(tmp_path, config(tmp_path))

    def sample(task):
        if len(world.observer.steps) == 3:
            world.orchestrator.stop_requested = True
        return sampled(world, task)

    asyncio.run(world.run(sample))
    step, folder = world.folder.latest_checkpoint()
    assert step == len(world.observer.steps) < 6
    saved = json.loads((folder / "orchestrator.json").read_text())
    resumed = World(tmp_path, config(tmp_path), state=RunState.from_json(world.cfg, saved), step=step)
    asyncio.run(resumed.run(lambda task: sampled(resumed, task)))
    assert resumed.observer.steps == list(range(step, 6))
    trained = [e.prompt_index for w in (world, resumed) for plan in w.consumed for e in plan.entries]
    assert len(set(trained)) == 6 * 3 and len(trained) == 6 * 3 * 2
    resumed.orchestrator.state.ledger.check()
    assert resumed.orchestrator.state.ledger.trained_prompts == 6 * 3


def test_steps_recorded_after_the_checkpoint_are_done_again_from_their_plans(tmp_path, monkeypatch):
    """A death within step 5, with the latest checkpoint at step 4: the plans of steps 4 and 5 are trained as they stood."""
    monkeypatch.setattr(
        "megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2
    )  # the payloads are not this test's matter
    world = World(tmp_path, config(tmp_path))

    with pytest.raises(BaseExceptionGroup):
        asyncio.run(world.run(lambda task: sampled(world, task), die_at=5))
    step, folder = world.folder.latest_checkpoint()
    assert step == 4
    saved = json.loads((folder / "orchestrator.json").read_text())
    resumed = World(tmp_path, config(tmp_path), state=RunState.from_json(world.cfg, saved), step=step)
    asyncio.run(resumed.run(lambda task: sampled(resumed, task)))
    assert resumed.observer.steps == [4, 5]
    assert resumed.consumed == world.consumed[4:]
    trained = [e.prompt_index for plan in [*world.consumed[:4], *resumed.consumed] for e in plan.entries]
    assert len(set(trained)) == 6 * 3 and len(trained) == 6 * 3 * 2
    resumed.orchestrator.state.ledger.check()
    assert resumed.orchestrator.state.ledger.trained_prompts == 6 * 3


def test_a_recorded_plan_that_is_not_whole_is_named_and_its_step_drawn_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    world = World(tmp_path, config(tmp_path))
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(world.run(lambda task: sampled(world, task), die_at=5))
    plan = world.orchestrator.spool.path("plans/step_000005.json")
    plan.write_bytes(plan.read_bytes()[:100])
    state, step = restore(world.cfg, world.folder, pytest.fail)
    resumed = World(tmp_path, config(tmp_path), state=state, step=step)
    assert "step_000005.json: not a whole plan" in resumed.observer.events[0]
    assert resumed.observer.events[0].endswith("; steps from 5 on are drawn anew")
    asyncio.run(resumed.run(lambda task: sampled(resumed, task)))
    assert resumed.observer.steps == [4, 5] and resumed.consumed[0] == world.consumed[4]
    resumed.orchestrator.state.ledger.check()
    assert resumed.orchestrator.state.ledger.trained_prompts == 6 * 3


def test_a_read_only_folder_ends_the_run_by_name(tmp_path, monkeypatch):
    """At the first checkpoint. (A folder that is read-only from the beginning is refused before anything is started.)"""
    world = World(tmp_path, config(tmp_path))

    def read_only(path, data):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("megatron_rl.orchestrator.checkpoints.write_atomically", read_only)

    async def scenario():
        parts = (
            world.orchestrator.run([world.trainer], world.start_trainer),
            world.work(lambda task: sampled(world, task)),
            world.train(),
        )
        return await asyncio.gather(*parts, return_exceptions=True)

    ended, _, _ = asyncio.run(scenario())
    assert isinstance(ended, RunFailedError) and "orchestrator.json: Read-only file system; nothing is lost: mend this" in str(ended)
    assert world.folder.latest_checkpoint() is None and world.observer.steps == [0, 1]


def test_a_full_disk_ends_the_run_by_name_and_nothing_is_lost(tmp_path, monkeypatch):
    world = World(tmp_path, config(tmp_path))
    write = world.orchestrator.spool.write_plan

    def full_at_step_3(plan, kind=None):
        if plan.step == 3 and kind is None:
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch/spool/plans")
        return write(plan, kind)

    monkeypatch.setattr(world.orchestrator.spool, "write_plan", full_at_step_3)

    async def scenario():
        parts = (
            world.orchestrator.run([world.trainer], world.start_trainer),
            world.work(lambda task: sampled(world, task)),
            world.train(),
        )
        return await asyncio.gather(*parts, return_exceptions=True)

    ended, _, _ = asyncio.run(scenario())
    assert isinstance(ended, RunFailedError) and "/scratch/spool/plans: No space left on device; nothing is lost" in str(ended)
    assert world.folder.latest_checkpoint()[0] == 2
    world.orchestrator.state.ledger.check()


def test_finished_groups_whose_payloads_are_gone_are_drawn_again(tmp_path):
    world = World(tmp_path, config(tmp_path))
    state = world.orchestrator.state
    for _ in range(2):
        state.end(sampled(world, state.begin("http://s0", 0)))
    there = world.folder.path / "spool" / "rollouts" / "g0000001a0.safetensors"
    there.touch()
    resumed = World(tmp_path, world.cfg, state=RunState.from_json(world.cfg, json.loads(json.dumps(state.to_json()))))
    assert [resumed.orchestrator.state.ledger.fate(index) for index in (0, 1)] == ["waiting", "buffered"]
    assert "1 finished groups are no longer in" in resumed.observer.events[-1]
