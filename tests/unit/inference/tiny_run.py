"""A run on `tiny_engine`: `python -m tests.unit.inference.tiny_run FOLDER` prints its outcome as JSON.

Real: the launcher's `run`, orchestrator, fleet and its server processes, worker, rewards, records, spool, weight transaction.
Stand-ins: the engine, and the trainer, whose steps change nothing but the version. Worker and trainer are tasks of this process.
"""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import numpy as np

from megatron_rl.batching import Spool
from megatron_rl.config import RunFolder, load_config, run_folder
from megatron_rl.inference import registry
from megatron_rl.inference.sender import ServerAddress
from megatron_rl.launch.local import check_before_start, prepare_folder
from megatron_rl.launch.machines import ThisMachine
from megatron_rl.launch.run import run
from megatron_rl.orchestrator import local_plan
from megatron_rl.records import Payload
from megatron_rl.rollouts.worker import work
from megatron_rl.weight_sync import update_servers
from megatron_rl.wire.access import with_key
from megatron_rl.wire.client import AsyncControlClient
from megatron_rl.wire.control import (
    Ack,
    Order,
    OrderRequest,
    ProbeOrder,
    ProbeReport,
    ProbeRequest,
    SavedReport,
    StepReport,
    WeightsReport,
)
from megatron_rl.wire.tensor_spec import TensorSpec
from tests.unit.inference.tiny_engine import TinyEngine

REPOSITORY = Path(__file__).resolve().parents[3]
OVERRIDES = {
    "run.steps": 3,
    "run.device": "cpu",
    "servers.engine": "tiny",
    "servers.count": 2,
    "rollouts.keep_set_source": "native",
    "rollouts.prompts_per_step": 4,
    "rollouts.samples_per_prompt": 2,
    "supervised.steps": 0,
    "trainer.max_restarts": 0,
    "checkpoint.every": 2,
    "checkpoint.export": "false",
    "metrics.tensorboard": "false",
}


class Weights:
    """A weight source: two tensors whose sums tell the version."""

    specs = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "float32"))

    def __init__(self, version):
        self.version = version

    def __iter__(self):
        return iter([(name, np.full(size, self.version, dtype=np.float32)) for name, size in (("a", 2), ("b", 3))])


class Trainer:
    def __init__(self, config, folder, url, key):
        self.config, self.folder, self.key = config, folder, key
        self.orchestrator = AsyncControlClient(url, key)
        self.engine = registry.engine_of(config)
        self.sender = self.engine.weight_sender(config.transport, config.servers.host, bucket_bytes=1 << 20, timeout_s=30)
        self.spool = Spool(folder.path)
        self.versions, self.consumed, self.servers = [], [], ()

    async def train(self):
        step = 0
        while (order := await self.orchestrator.send("/order", OrderRequest(step, wait_s=1.0), Order)).kind != "stop":
            if order.kind == "sync":
                await self.publish(order.servers, step)
            elif order.kind == "train":
                self.consume(self.spool.read_plan(order.plan_file), step)
                await self.orchestrator.send("/step", StepReport(step, {}), Ack)
                step += 1
            elif order.kind == "save":
                staging = self.folder.checkpoints / f".step_{step}.part"
                staging.mkdir()
                await self.orchestrator.send("/saved", SavedReport(step, str(staging)), Ack)

    async def publish(self, servers, version):
        addresses = [ServerAddress(url, url) for url in servers]
        report = await asyncio.to_thread(
            update_servers, self.engine, self.sender, addresses, Weights(version), version, key=self.key, timeout_s=30.0
        )
        assert not report.failed, report.failed
        self.versions.append(version)
        self.servers = servers
        await self.orchestrator.send("/weights", WeightsReport(version, report.held), Ack)
        while not (probe := await self.orchestrator.send("/probe", ProbeRequest(version, wait_s=1.0), ProbeOrder)).ready:
            pass
        if probe.plan_file:
            uids = [entry.uid for entry in self.spool.read_plan(probe.plan_file).entries]
            await self.orchestrator.send("/probed", ProbeReport(version, dict.fromkeys(uids, 0.0)), Ack)

    def consume(self, plan, step):
        for entry in plan.entries:
            rollout = Payload(self.spool.path(entry.file)).rollout(entry.index)
            age = step - int(rollout.policy_versions.min())
            assert 0 <= age <= self.config.rollouts.max_staleness
            self.consumed.append(age)


class Task:
    """A coroutine that the orchestrator watches like a process."""

    def __init__(self, name, coroutine):
        self.name, self.task = name, asyncio.create_task(coroutine)

    def poll(self):
        if not self.task.done():
            return None
        return 1 if self.task.cancelled() or self.task.exception() else 0

    def failure(self):
        return f"{self.name}: {self.task.exception()!r}"


class Machines(ThisMachine):
    """Servers are processes of this machine, as in a real run."""

    def start_workers(self, environment):
        url = environment["MEGATRON_RL_ORCHESTRATOR"]
        return [Task("worker-0", work(self._folder, url, self.key, "worker-0"))]

    def start_trainer(self, environment, resume):
        self.trainer = Trainer(self._config, self._folder, environment["MEGATRON_RL_ORCHESTRATOR"], self.key)
        self.server_state = None
        return [Task("trainer-0", self._train())]

    async def _train(self):
        await self.trainer.train()
        url = self.trainer.servers[0]
        answer = await asyncio.to_thread(httpx.post, f"{url}/state", json={}, headers=with_key(self.key), trust_env=False)
        self.server_state = answer.json()


def main(scratch):
    registry.ENGINES["tiny"] = TinyEngine
    overrides = [f"--{key}={value}" for key, value in {**OVERRIDES, "run.folder": scratch}.items()]
    config = load_config(REPOSITORY / "model_configs/tiny-moe-cpu.toml", overrides)
    folder: RunFolder = run_folder(config)
    check_before_start(config)
    prepare_folder(config, folder)
    machines = Machines(config, folder, local_plan(config, ()))
    end = asyncio.run(run(config, folder, machines, resume=False, stop_signals=()))
    return {
        "finished": end.finished,
        "versions": machines.trainer.versions,
        "consumed": machines.trainer.consumed,
        "server": machines.server_state,
        "of_vllm": sorted(m for m in sys.modules if m.split(".")[0] == "vllm" or m.startswith("megatron_rl.inference.vllm")),
    }


if __name__ == "__main__":
    outcome = main(Path(sys.argv[1]))
    print(json.dumps(outcome))
