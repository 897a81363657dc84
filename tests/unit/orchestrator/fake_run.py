"""A run whose workers, servers and trainer are a few lines each; the orchestrator's HTTP application is the real one."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import httpx

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator import Orchestrator, RunState, control_app
from megatron_rl.orchestrator.fleet import Fleet, FleetLimits
from megatron_rl.records import GroupResult, GroupTask, RolloutSummary, StepPlan
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
)

KEY = "k"


def config(tmp_path: Path, **rollouts) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "t", "folder": str(tmp_path), "steps": 6},
            "model": {"architecture": {"model_type": "qwen3_moe"}, "dtype": "float32", "max_sequence_length": 64},
            "task": {"name": "chain_sum"},
            "rollouts": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 8, "max_staleness": 1, **rollouts},
            "checkpoint": {"every": 2, "keep": 2},
        }
    )


class Recorder:
    def __init__(self) -> None:
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

    def why_ended(self):
        return None if self.code is None else f"ended with exit code {self.code}"

    async def stop(self): ...


class FakeChild:
    """A process that ends on request."""

    def __init__(self, name) -> None:
        self.name, self.status = name, None

    def poll(self):
        return self.status

    def failure(self):
        return f"{self.name} ended with status {self.status}"


class FakeRun:
    """An orchestrator with servers that are healthy at once, with the real HTTP application."""

    def __init__(self, tmp_path, cfg, num_servers=2, state=None, step=0) -> None:
        self.cfg, self.folder = cfg, RunFolder(tmp_path / "t")
        self.folder.create(cfg)
        self.servers: list[FakeServer] = []
        self.observer = Recorder()
        limits = FleetLimits(check_every_s=0.01, restart_delay_s=0.0, max_restarts=2)
        fleet = Fleet(num_servers, self._start, self._check, limits)
        self.orchestrator = Orchestrator(cfg, self.folder, state or RunState.new(cfg), fleet, self.observer, step)
        self.orchestrator.context.spool.create()
        self.http = self.client(self.orchestrator)
        self.trainer, self.consumed, self.versions = FakeChild("trainer-0"), [], []
        self.restarted_with, self.restarts = {}, []
        self.saves = []

    @staticmethod
    def client(orchestrator):
        app = control_app(KEY, orchestrator.handlers, orchestrator.status)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://o", headers={KEY_HEADER: KEY})

    async def _start(self, slot):
        server = FakeServer(f"http://s{slot}.{len(self.servers)}")
        self.servers.append(server)
        return server

    async def _check(self, url): ...

    async def start_trainer(self):
        """As the launcher does: a new process, which begins at the latest checkpoint."""
        self.trainer = FakeChild("trainer-0")
        latest = self.folder.latest_checkpoint()
        self.restarts.append(asyncio.create_task(self.train(step=latest[0] if latest else 0, **self.restarted_with)))
        return [self.trainer]

    async def post(self, route, message, answer):
        reply = await self.http.post(route, content=encode(message))
        reply.raise_for_status()
        return decode(reply.content, answer)

    async def work(self, sample):
        while not (order := await self.post("/work", WorkRequest("w", slots=4, wait_s=0.2), WorkOrder)).stop:
            for task in order.tasks:
                await self.post("/groups", GroupReport("w", sample(task)), Ack)
            await asyncio.sleep(0)

    async def train(self, abs_dlogp=0.0, die_at=None, killed_at=None, step=None):
        """die_at: the complete program dies within this step. killed_at: only this process dies."""
        step = self.orchestrator.context.step if step is None else step
        while (order := await self.post("/order", OrderRequest(step, wait_s=0.2), Order)).kind != "stop":
            if order.kind == "sync":
                await self.post("/weights", WeightsReport(step, order.servers), Ack)
                self.versions.append(step)
                probe = await self.post("/probe", ProbeRequest(step, wait_s=1.0), ProbeOrder)
                assert probe.ready
                if probe.plan_file:
                    plan = self.orchestrator.context.spool.read_plan(probe.plan_file)
                    assert plan.summary["staleness_max"] == 0
                    await self.post("/probed", ProbeReport(step, {e.uid: abs_dlogp for e in plan.entries}), Ack)
            elif order.kind == "train":
                plan = self.orchestrator.context.spool.read_plan(order.plan_file)
                assert isinstance(plan, StepPlan) and plan.step == step
                self.consumed.append(plan)
                if step == die_at:
                    raise InterruptedError
                if step == killed_at:
                    self.trainer.status = -9
                    return
                await self.post("/step", StepReport(step, {}), Ack)
                step += 1
            elif order.kind == "save":
                staging = self.folder.checkpoints / f".step_{step}.part"
                staging.mkdir()
                self.saves.append(step)
                await self.post("/saved", SavedReport(step, str(staging)), Ack)
        self.trainer.status = 0

    async def run(self, sample, **kwargs):
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(self.orchestrator.run([self.trainer], self.start_trainer))
            group.create_task(self.work(sample))
            group.create_task(self.train(**kwargs))


def sampled(fake, task: GroupTask, rng=random) -> GroupResult:
    version = next((s.version for s in fake.orchestrator.context.fleet.servers if s.url == task.server), 0) or 0
    rollouts = tuple(
        RolloutSummary(
            f"{task.uid}.{i}", f"rollouts/{task.uid}.safetensors", i, 4, 5, 5, 2, 9, 5, 8, rng.random(), "stop", version, version
        )
        for i in range(task.num_samples)
    )
    return GroupResult(task.uid, task.prompt_index, task.attempt, task.server, rollouts)
