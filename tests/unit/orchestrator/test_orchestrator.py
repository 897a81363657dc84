"""The asynchronous loop against workers and a trainer made of a few lines each: order of events, bounds, faults, resume."""

import asyncio
import errno
import json
import random
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator import Orchestrator, RunFailed, RunState, control_app
from megatron_rl.records import GroupResult, GroupTask, RolloutSummary, StepPlan
from megatron_rl.rollouts.fleet import Fleet, FleetLimits
from megatron_rl.wire.access import KEY_HEADER
from megatron_rl.wire.control import (
    Ack,
    GroupReport,
    Order,
    OrderRequest,
    ProbeOrder,
    ProbeReport,
    ProbeRequest,
    SavedReport,
    StepReport,
    WeightsReport,
    WorkOrder,
    WorkRequest,
    decode,
    encode,
)  # fmt: skip

KEY = "k"


def config(tmp_path: Path, **rollouts) -> Config:
    return Config.model_validate({
        "run": {"name": "t", "folder": str(tmp_path), "steps": 6},
        "model": {"architecture": {"model_type": "qwen3_moe"}, "dtype": "float32", "max_sequence_length": 64},
        "task": {"name": "chain_sum"},
        "rollouts": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 8, "max_staleness": 1, **rollouts},
        "checkpoint": {"every": 2, "keep": 2},
    })  # fmt: skip


class Recorder:
    def __init__(self):
        self.events, self.steps, self.batches = [], [], []

    def batch(self, summary, examples):
        self.batches.append(dict(summary))

    def step(self, step, metrics, *, rollout_tokens_per_s, ledger):
        self.steps.append(step)

    def progress(self, report): ...

    def event(self, message):
        self.events.append(message)


@dataclass
class FakeServer:
    url: str
    code: int | None = None

    def poll(self):
        return self.code

    async def stop(self): ...


class FakeChild:
    """A process that ends when it is told."""

    def __init__(self, name):
        self.name, self.status = name, None

    def poll(self):
        return self.status

    def failure(self):
        return f"{self.name} ended with status {self.status}"


class World:
    """An orchestrator with servers that are healthy at once, behind the real HTTP application."""

    def __init__(self, tmp_path, cfg, num_servers=2, state=None, step=0):
        self.cfg, self.folder = cfg, RunFolder(tmp_path / "t")
        self.folder.create(cfg)
        self.servers: list[FakeServer] = []
        self.observer = Recorder()
        limits = FleetLimits(check_every_s=0.01, restart_delay_s=0.0, max_restarts=2)
        fleet = Fleet(num_servers, self._start, self._check, limits)
        self.orchestrator = Orchestrator(cfg, self.folder, state or RunState.new(cfg), fleet, self.observer, step)
        self.orchestrator.spool.create()
        app = control_app(KEY, self.orchestrator.handlers, self.orchestrator.status)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://o", headers={KEY_HEADER: KEY})
        self.trainer, self.consumed, self.versions = FakeChild("trainer-0"), [], []

    async def _start(self, slot):
        server = FakeServer(f"http://s{slot}.{len(self.servers)}")
        self.servers.append(server)
        return server

    async def _check(self, url): ...

    async def post(self, route, message, answer):
        reply = await self.http.post(route, content=encode(message))
        reply.raise_for_status()
        return decode(reply.content, answer)

    async def work(self, sample):
        while not (order := await self.post("/work", WorkRequest("w", slots=4, wait_s=0.2), WorkOrder)).stop:
            for task in order.tasks:
                await self.post("/groups", GroupReport("w", sample(task)), Ack)
            await asyncio.sleep(0)

    async def train(self, abs_dlogp=0.0, die_at=None):
        step = self.orchestrator.step
        while (order := await self.post("/order", OrderRequest(step, wait_s=0.2), Order)).kind != "stop":
            if order.kind == "sync":
                await self.post("/weights", WeightsReport(step, order.servers), Ack)
                self.versions.append(step)
                probe = await self.post("/probe", ProbeRequest(step, wait_s=1.0), ProbeOrder)
                assert probe.ready
                if probe.plan_file:
                    plan = self.orchestrator.spool.read_plan(probe.plan_file)
                    assert plan.summary["staleness_max"] == 0
                    await self.post("/probed", ProbeReport(step, {e.uid: abs_dlogp for e in plan.entries}), Ack)
            elif order.kind == "train":
                plan = self.orchestrator.spool.read_plan(order.plan_file)
                assert isinstance(plan, StepPlan) and plan.step == step
                self.consumed.append(plan)
                if step == die_at:
                    raise InterruptedError
                await self.post("/step", StepReport(step, {}), Ack)
                step += 1
            elif order.kind == "save":
                aside = self.folder.checkpoints / f".step_{step}.part"
                aside.mkdir()
                await self.post("/saved", SavedReport(step, str(aside)), Ack)
        self.trainer.status = 0

    async def run(self, sample, **kwargs):
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(self.orchestrator.run([self.trainer]))
            group.create_task(self.work(sample))
            group.create_task(self.train(**kwargs))


def sampled(world, task: GroupTask, rng=random) -> GroupResult:
    version = next((s.version for s in world.orchestrator.fleet.servers if s.url == task.server), 0) or 0
    rollouts = tuple(
        RolloutSummary(f"{task.uid}.{i}", f"rollouts/{task.uid}.safetensors", i, 4, 5, 5, 2, 9, 5, 8, rng.random(), "stop", version, version)
        for i in range(task.num_samples)
    )
    return GroupResult(task.uid, task.prompt_index, task.attempt, task.server, rollouts)


def test_every_step_is_trained_once_within_the_bound_and_the_ledger_adds_up(tmp_path):
    world = World(tmp_path, config(tmp_path))
    asyncio.run(world.run(lambda task: sampled(world, task)))
    assert world.observer.steps == list(range(6))
    assert sorted(set(world.versions)) == list(range(6))
    trained = [e.prompt_index for plan in world.consumed for e in plan.entries]
    assert len(trained) == 6 * 3 * 2 and len(set(trained)) == 6 * 3
    assert max(b["staleness_max"] for b in world.observer.batches) <= 1
    world.orchestrator.state.ledger.check()
    assert [step for step, _ in world.folder.whole_checkpoints()] == [4, 6]


def test_generation_runs_ahead_but_no_further_than_the_bound(tmp_path):
    world = World(tmp_path, config(tmp_path, max_staleness=1), num_servers=1)
    begun = []

    async def scenario():
        fleet = asyncio.create_task(world.orchestrator.fleet.run())
        while not world.orchestrator.fleet.to_sync(0):
            await asyncio.sleep(0.01)
        await world.post("/weights", WeightsReport(0, (world.servers[0].url,)), Ack)
        world.orchestrator._probe = None
        while tasks := (await world.post("/work", WorkRequest("w", slots=4, wait_s=0.05), WorkOrder)).tasks:
            begun.extend(tasks)
        fleet.cancel()

    asyncio.run(scenario())
    assert len(begun) == 2 * 3  # steps 0 and 1 may consume what version 0 samples


def test_failed_groups_are_drawn_again_and_given_up_after_max_attempts(tmp_path):
    world = World(tmp_path, config(tmp_path, max_attempts=2))

    def sample(task):
        if task.prompt_index % 5 == 0 and not task.probe:
            return GroupResult(task.uid, task.prompt_index, task.attempt, task.server, failure="contract", message="a repeated expert")
        return sampled(world, task)

    asyncio.run(world.run(sample))
    ledger = world.orchestrator.state.ledger
    ledger.check()
    assert world.observer.steps == list(range(6))
    assert ledger.dropped["contract"] >= 3 and ledger.fate(0) == "dropped: contract"
    assert ledger.discarded["contract"] >= 2 * ledger.dropped["contract"]
    assert any("a repeated expert" in event for event in world.observer.events)


def test_a_run_whose_groups_all_fail_ends_with_the_reason(tmp_path):
    world = World(tmp_path, config(tmp_path))

    def sample(task):
        if task.probe:
            return sampled(world, task)
        return GroupResult(task.uid, task.prompt_index, task.attempt, task.server, failure="reward", message="ZeroDivisionError in my_reward")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(world.run(sample))
    failed = [e for e in caught.value.exceptions if isinstance(e, RunFailed)]
    assert "ZeroDivisionError in my_reward" in str(failed[0])


def test_a_server_that_dies_loses_its_groups_to_the_others(tmp_path):
    world = World(tmp_path, config(tmp_path))
    died = []

    def sample(task):
        if not died and not task.probe and task.prompt_index > 4:
            died.append(task.server)
            next(s for s in world.servers if s.url == task.server).code = -9
        if task.server in died:
            return GroupResult(task.uid, task.prompt_index, task.attempt, task.server, failure="server", message="connection refused")
        return sampled(world, task)

    asyncio.run(world.run(sample))
    world.orchestrator.state.ledger.check()
    assert world.observer.steps == list(range(6)) and len(world.servers) == 3
    assert not world.orchestrator.state.ledger.dropped
    assert any("exit code -9" in event for event in world.observer.events)


def test_a_server_whose_probe_is_off_leaves_the_fleet(tmp_path):
    world = World(tmp_path, config(tmp_path), num_servers=1)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(world.run(lambda task: sampled(world, task), abs_dlogp=0.5))
    failed = [e for e in caught.value.exceptions if isinstance(e, RunFailed)]
    assert "no rollout server is left" in str(failed[0])
    assert any("is off by 0.5" in event for event in world.observer.events)


def test_a_trainer_that_dies_ends_the_run_with_its_log(tmp_path):
    world = World(tmp_path, config(tmp_path))

    async def scenario():
        world.trainer.status = 1
        await world.orchestrator.run([world.trainer])

    with pytest.raises(RunFailed, match="trainer-0 ended with status 1"):
        asyncio.run(scenario())


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
    monkeypatch.setattr("megatron_rl.batching.Spool.payload", lambda self, name: [None] * 2)  # the payloads are not this test's matter
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


def test_requests_without_the_key_are_refused(tmp_path):
    world = World(tmp_path, config(tmp_path))

    async def scenario():
        bare = httpx.AsyncClient(transport=httpx.ASGITransport(world.http._transport.app), base_url="http://o")
        posted = await bare.post("/step", content=encode(StepReport(0, {})))
        asked = await bare.get("/status")
        wrong = await world.http.post("/step", content=b'{"step": "x"}')
        return posted.status_code, asked.status_code, wrong.status_code

    assert asyncio.run(scenario()) == (401, 401, 400)


def test_a_report_that_is_sent_again_counts_once(tmp_path):
    """The answer to the first one was lost on the way."""
    world = World(tmp_path, config(tmp_path))
    once = world.post

    async def twice(route, message, answer):
        first = await once(route, message, answer)
        return await once(route, message, answer) if route in ("/step", "/saved", "/groups") else first

    world.post = twice
    asyncio.run(world.run(lambda task: sampled(world, task)))
    assert world.observer.steps == list(range(6))
    world.orchestrator.state.ledger.check()
    assert world.orchestrator.state.ledger.trained_prompts == 6 * 3


def test_a_full_disk_ends_the_run_by_name_and_nothing_is_lost(tmp_path, monkeypatch):
    world = World(tmp_path, config(tmp_path))
    write = world.orchestrator.spool.write_plan

    def full_at_step_3(plan, kind=None):
        if plan.step == 3 and kind is None:
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch/spool/plans")
        return write(plan, kind)

    monkeypatch.setattr(world.orchestrator.spool, "write_plan", full_at_step_3)

    async def scenario():
        parts = (world.orchestrator.run([world.trainer]), world.work(lambda task: sampled(world, task)), world.train())
        return await asyncio.gather(*parts, return_exceptions=True)

    ended, _, _ = asyncio.run(scenario())
    assert isinstance(ended, RunFailed) and "/scratch/spool/plans: No space left on device; nothing is lost" in str(ended)
    assert world.folder.latest_checkpoint()[0] == 2
    world.orchestrator.state.ledger.check()
