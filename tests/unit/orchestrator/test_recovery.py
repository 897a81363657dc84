"""What the orchestrator does after a trainer's death, a stop, a bad disk or a damaged file.

Nothing is lost, nothing is done twice.
"""

import asyncio
import errno
import json

import pytest

from megatron_rl.orchestrator import RunFailedError, RunState, restore
from megatron_rl.orchestrator.ranks import WINDOW_STEPS, TrainerRanks
from megatron_rl.wire.control import Rendezvous, RendezvousRequest, WorkOrder, WorkRequest
from tests.unit.orchestrator.fake_run import FakeChild, FakeRun, config, sampled


def test_a_trainer_that_dies_starts_again_and_does_the_recorded_steps_again(tmp_path, monkeypatch):
    """Killed within step 5, with the latest checkpoint at step 4: nothing else of the run goes back."""
    monkeypatch.setattr(
        "megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2
    )  # the payloads are not this test's matter
    fake = FakeRun(tmp_path, config(tmp_path))
    asyncio.run(fake.run(lambda task: sampled(fake, task), killed_at=5))
    assert fake.observer.steps == list(range(6))  # each reported once
    assert [plan.step for plan in fake.consumed] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert fake.consumed[6:] == fake.consumed[4:6]
    assert sorted(set(fake.versions)) == list(range(6)) and fake.versions == sorted(fake.versions)  # no server went back
    assert fake.saves == [2, 4, 6]
    trained = [e.prompt_index for plan in fake.consumed[:6] for e in plan.entries]
    assert len(trained) == 6 * 3 * 2 and len(set(trained)) == 6 * 3 == fake.orchestrator.context.state.ledger.trained_prompts
    assert len(fake.servers) == 2 and not fake.orchestrator.context.state.ledger.discarded
    assert any(
        f"the trainer is restarted from {fake.folder.checkpoint(4)}, and catches up to step 5" in event
        for event in fake.observer.events
    )


def failure_of(fake, **kwargs) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fake.run(lambda task: sampled(fake, task), **kwargs))
    return str(next(e for e in caught.value.exceptions if isinstance(e, RunFailedError)))


def test_a_trainer_that_dies_at_the_same_step_again_and_again_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    fake = FakeRun(tmp_path, config(tmp_path))
    fake.restarted_with = {"killed_at": 3}
    failure = failure_of(fake, killed_at=3)
    assert "restarted 3 times within 10 finished steps (trainer.max_restarts)" in failure
    assert [plan.step for plan in fake.consumed] == [0, 1, 2, 3] + [2, 3] * 3


def test_a_fault_that_comes_back_at_every_step_does_not_restart_the_trainer_without_end():
    async def restarted(ranks: TrainerRanks) -> None:
        await ranks.restart([], no_ranks)

    async def no_ranks() -> list:
        return []

    ranks = TrainerRanks(max_restarts=3)
    ranks.record_order_request()
    for _ in range(3):
        assert not ranks.why_no_restart()
        asyncio.run(restarted(ranks))
        ranks.finish_step()
    assert ranks.why_no_restart() == "restarted 3 times within 10 finished steps (trainer.max_restarts)"
    for _ in range(WINDOW_STEPS - 3):
        ranks.finish_step()
    assert not ranks.why_no_restart()  # the first restart is out of the window


def test_a_step_that_cannot_be_done_again_is_named(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))  # whose payloads do not exist
    failure = failure_of(fake, killed_at=3)
    assert "step 2 cannot be done again: " in failure and "spool/rollouts/g" in failure
    assert "its rollouts have to be sampled again; --resume samples new rollouts from this step on" in failure


def test_a_step_whose_plan_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    fake = FakeRun(tmp_path, config(tmp_path))
    done = fake.orchestrator.trainer.on_step

    async def forgetful(report):
        fake.orchestrator.context.spool.path("plans/step_000002.json").unlink(missing_ok=True)
        return await done(report)

    monkeypatch.setattr(fake.orchestrator.trainer, "on_step", forgetful)
    fake.http = FakeRun.client(fake.orchestrator)
    failure = failure_of(fake, killed_at=3)
    assert (
        "step 2 cannot be done again: " in failure
        and "plans/step_000002.json is missing; --resume samples new rollouts" in failure
    )


def test_a_worker_that_dies_is_removed_and_the_others_sample_again_what_it_had_begun(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))
    lost, other = FakeChild("worker-0"), FakeChild("worker-1")

    async def take_and_die():
        tasks = []
        while all(task.probe for task in tasks):
            tasks = (await fake.post("/work", WorkRequest("worker-0", slots=2, wait_s=0.2), WorkOrder)).tasks
        lost.status = -9

    async def scenario():
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(fake.orchestrator.run([fake.trainer, lost, other], fake.start_trainer))
            group.create_task(fake.train())
            await take_and_die()
            await fake.work(lambda task: sampled(fake, task))

    asyncio.run(scenario())
    assert fake.observer.steps == list(range(6))
    assert any(
        "worker-0 ended with status -9" in event and "2 groups will be sampled again" in event for event in fake.observer.events
    )
    ledger = fake.orchestrator.context.state.ledger
    ledger.check()
    assert ledger.trained_prompts == 6 * 3 and ledger.discarded["interrupted"] == 2


def test_the_last_worker_ends_the_run(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))
    alone = FakeChild("worker-0")
    alone.status = -9
    with pytest.raises(RunFailedError, match="worker-0 ended with status -9"):
        asyncio.run(fake.orchestrator.run([fake.trainer, alone], fake.start_trainer))


def test_the_ranks_rendezvous_where_the_first_serves_and_those_of_the_restarted_with_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    fake = FakeRun(tmp_path, config(tmp_path))
    met = []

    async def train(**kwargs):
        asked = asyncio.create_task(fake.post("/rendezvous", RendezvousRequest(1, wait_s=5.0), Rendezvous))
        await asyncio.sleep(0.05)
        assert not asked.done()
        await fake.post("/rendezvous", RendezvousRequest(0, "10.0.0.1", 4000 + len(met)), Rendezvous)
        met.append(await asked)
        await FakeRun.train(fake, **kwargs)

    fake.train = train
    asyncio.run(fake.run(lambda task: sampled(fake, task), killed_at=5))
    assert met == [Rendezvous("10.0.0.1", 4000), Rendezvous("10.0.0.1", 4001)]


def test_stopping_saves_and_a_resumed_run_trains_the_rest(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))

    def sample(task):
        if len(fake.observer.steps) == 3:
            fake.orchestrator.context.stop_requested = True
        return sampled(fake, task)

    asyncio.run(fake.run(sample))
    step, folder = fake.folder.latest_checkpoint()
    assert step == len(fake.observer.steps) < 6
    saved = json.loads((folder / "orchestrator.json").read_text())
    resumed = FakeRun(tmp_path, config(tmp_path), state=RunState.from_json(fake.cfg, saved), step=step)
    asyncio.run(resumed.run(lambda task: sampled(resumed, task)))
    assert resumed.observer.steps == list(range(step, 6))
    trained = [e.prompt_index for w in (fake, resumed) for plan in w.consumed for e in plan.entries]
    assert len(set(trained)) == 6 * 3 and len(trained) == 6 * 3 * 2
    resumed.orchestrator.context.state.ledger.check()
    assert resumed.orchestrator.context.state.ledger.trained_prompts == 6 * 3


def test_steps_recorded_after_the_checkpoint_are_done_again_from_their_plans(tmp_path, monkeypatch):
    """A death within step 5, with the latest checkpoint at step 4: the plans of steps 4 and 5 are trained as they stood."""
    monkeypatch.setattr(
        "megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2
    )  # the payloads are not this test's matter
    fake = FakeRun(tmp_path, config(tmp_path))

    with pytest.raises(BaseExceptionGroup):
        asyncio.run(fake.run(lambda task: sampled(fake, task), die_at=5))
    step, folder = fake.folder.latest_checkpoint()
    assert step == 4
    saved = json.loads((folder / "orchestrator.json").read_text())
    resumed = FakeRun(tmp_path, config(tmp_path), state=RunState.from_json(fake.cfg, saved), step=step)
    asyncio.run(resumed.run(lambda task: sampled(resumed, task)))
    assert resumed.observer.steps == [4, 5]
    assert resumed.consumed == fake.consumed[4:]
    trained = [e.prompt_index for plan in [*fake.consumed[:4], *resumed.consumed] for e in plan.entries]
    assert len(set(trained)) == 6 * 3 and len(trained) == 6 * 3 * 2
    resumed.orchestrator.context.state.ledger.check()
    assert resumed.orchestrator.context.state.ledger.trained_prompts == 6 * 3


def test_an_incomplete_recorded_plan_is_named_and_its_step_sampled_again(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)
    fake = FakeRun(tmp_path, config(tmp_path))
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(fake.run(lambda task: sampled(fake, task), die_at=5))
    plan = fake.orchestrator.context.spool.path("plans/step_000005.json")
    plan.write_bytes(plan.read_bytes()[:100])
    state, step = restore(fake.cfg, fake.folder, pytest.fail)
    resumed = FakeRun(tmp_path, config(tmp_path), state=state, step=step)
    assert "step_000005.json: not a complete plan" in resumed.observer.events[0]
    assert resumed.observer.events[0].endswith("; new rollouts are sampled from step 5 on")
    asyncio.run(resumed.run(lambda task: sampled(resumed, task)))
    assert resumed.observer.steps == [4, 5] and resumed.consumed[0] == fake.consumed[4]
    resumed.orchestrator.context.state.ledger.check()
    assert resumed.orchestrator.context.state.ledger.trained_prompts == 6 * 3


def test_a_read_only_folder_ends_the_run_by_name(tmp_path, monkeypatch):
    """At the first checkpoint. (A folder that is read-only from the beginning is refused before anything is started.)"""
    fake = FakeRun(tmp_path, config(tmp_path))

    def read_only(path, data):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("megatron_rl.orchestrator.checkpoints.write_atomically", read_only)

    async def scenario():
        parts = (
            fake.orchestrator.run([fake.trainer], fake.start_trainer),
            fake.work(lambda task: sampled(fake, task)),
            fake.train(),
        )
        return await asyncio.gather(*parts, return_exceptions=True)

    ended, _, _ = asyncio.run(scenario())
    assert isinstance(ended, RunFailedError) and "orchestrator.json: Read-only file system; nothing is lost: fix this" in str(
        ended
    )
    assert fake.folder.latest_checkpoint() is None and fake.observer.steps == [0, 1]


def test_a_full_disk_ends_the_run_by_name_and_nothing_is_lost(tmp_path, monkeypatch):
    fake = FakeRun(tmp_path, config(tmp_path))
    write = fake.orchestrator.context.spool.write_plan

    def full_at_step_3(plan, kind="step"):
        if plan.step == 3 and kind == "step":
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch/spool/plans")
        return write(plan, kind)

    monkeypatch.setattr(fake.orchestrator.context.spool, "write_plan", full_at_step_3)

    async def scenario():
        parts = (
            fake.orchestrator.run([fake.trainer], fake.start_trainer),
            fake.work(lambda task: sampled(fake, task)),
            fake.train(),
        )
        return await asyncio.gather(*parts, return_exceptions=True)

    ended, _, _ = asyncio.run(scenario())
    assert isinstance(ended, RunFailedError) and "/scratch/spool/plans: No space left on device; nothing is lost" in str(ended)
    assert fake.folder.latest_checkpoint()[0] == 2
    fake.orchestrator.context.state.ledger.check()


def test_finished_groups_whose_payloads_are_missing_are_sampled_again(tmp_path):
    fake = FakeRun(tmp_path, config(tmp_path))
    state = fake.orchestrator.context.state
    for _ in range(2):
        state.end(sampled(fake, state.begin("http://s0", 0)))
    there = fake.folder.path / "spool" / "rollouts" / "g0000001a0.safetensors"
    there.touch()
    resumed = FakeRun(tmp_path, fake.cfg, state=RunState.from_json(fake.cfg, json.loads(json.dumps(state.to_json()))))
    assert [resumed.orchestrator.context.state.ledger.outcome(index) for index in (0, 1)] == ["waiting", "buffered"]
    assert "1 finished group of the checkpoint will be sampled again: no payload in" in resumed.observer.events[-1]
