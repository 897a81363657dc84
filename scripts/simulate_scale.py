"""CPU time that a large run takes in the processes without a GPU: `scripts/simulate_scale.py [--servers 2048] [--json FILE]`.

Three measurements of the project's code on this machine's cores:

- the orchestrator with its HTTP server, buffer, ledger, step plans and fleet, for simulated servers: a second process takes the
  part of the workers and the trainer and answers at once, so that CPU time per rollout is measured, not speed;
- a rollout worker: responses of a server for a model of Kimi-K2's size, one after the other, from JSON to the payload file;
- the division of one weight update of that model into buckets.

Not measured: networks, a shared filesystem, GPUs.
"""

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from megatron_rl.config import Config, RunFolder
from megatron_rl.inference.vllm.completion import decode_completion
from megatron_rl.orchestrator import Orchestrator, RunState, control_app, listen, serving
from megatron_rl.orchestrator.fleet import Fleet
from megatron_rl.records import GroupResult, GroupTask, ModelContract, RolloutSummary, Sampling, check_rollout, write_payload
from megatron_rl.rollouts.episode import EpisodeRules, run_episode
from megatron_rl.rollouts.group import summary_of
from megatron_rl.wire.access import with_key
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
from megatron_rl.wire.tensor_spec import TensorSpec
from megatron_rl.wire.weights import plan_buckets

ROLLOUTS_PER_MINUTE = 16
"""Of one server."""
TOKENS_PER_S = 2000
"""Of one server."""
PROMPT, COMPLETION = 512, TOKENS_PER_S * 60 // ROLLOUTS_PER_MINUTE
KEY = "simulated"


class SilentObserver:
    """Shows nothing."""

    def batch(self, summary: Mapping[str, float], examples: object) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float], **_: object) -> None: ...
    def progress(self, report: object) -> None: ...
    def event(self, message: str) -> None: ...


@dataclass
class VirtualServer:
    url: str

    def why_ended(self) -> str | None:
        return None

    async def stop(self) -> None: ...


def run_config(folder: Path, servers: int, steps: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "scale", "steps": steps, "folder": folder, "device": "cuda", "stall_after_s": 1e6},
            "model": {"path": "/m", "max_sequence_length": 16384},
            "task": {"name": "t"},
            "rollouts": {"prompts_per_step": servers // 2, "samples_per_prompt": 16, "max_staleness": 2, "max_new_tokens": 12288},
            "servers": {"count": servers, "max_num_seqs": 16},
            "checkpoint": {"every": 10**6},
            "weight_sync": {"probe_every": 10**6},
        }
    )


def measure_orchestrator(servers: int, steps: int) -> dict[str, float]:
    """CPU seconds of the orchestrator for `steps` steps, and the cores that it needs for a fleet of that size."""
    with tempfile.TemporaryDirectory() as scratch:
        config = run_config(Path(scratch), servers, steps)
        folder = RunFolder(Path(scratch) / "scale")
        folder.create(config)
        cpu_s, rollouts, checks_per_s, check_s = asyncio.run(_orchestrate(config, folder))
    per_1000 = 1000 * cpu_s / rollouts
    rate = servers * ROLLOUTS_PER_MINUTE / 60
    return {
        "orchestrator_cpu_s_per_1000_rollouts": per_1000,
        "health_check_cpu_s": check_s,
        "health_checks_per_s": checks_per_s,
        "orchestrator_cores": per_1000 * rate / 1000 + checks_per_s * check_s,
        "rollouts": rollouts,
    }


async def _orchestrate(config: Config, folder: RunFolder) -> tuple[float, int, float, float]:
    async def start(slot: int) -> VirtualServer:
        return VirtualServer(f"http://10.{slot >> 8}.{slot & 255}.1:8000")

    async def check(url: str) -> None: ...

    fleet = Fleet(config.servers.count, start, check)
    orchestrator = Orchestrator(config, folder, RunState.new(config), fleet, SilentObserver())
    orchestrator.context.spool.create()
    listener = listen("127.0.0.1")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(control_app(KEY, orchestrator.handlers, orchestrator.status), listener):
        player = multiprocessing.get_context("spawn").Process(target=play, args=(url, str(folder.path)), daemon=True)
        player.start()
        began = time.process_time()
        await orchestrator.run([_Process(player)], _no_restart)
        cpu_s = time.process_time() - began
        player.join()
    rollouts = orchestrator.context.state.ledger.trained_prompts * config.rollouts.samples_per_prompt
    return cpu_s, rollouts, config.servers.count / fleet.check_every_s, await _cost_of_a_check()


@dataclass
class _Process:
    """The process that simulates the trainer, with the interface that the orchestrator watches."""

    process: multiprocessing.Process
    name: str = "trainer-0"

    def poll(self) -> int | None:
        return self.process.exitcode

    def failure(self) -> str:
        return f"the simulated trainer ended with {self.process.exitcode}"


async def _no_restart() -> list:
    raise RuntimeError("the simulated trainer has exited and is not restarted")


async def _cost_of_a_check(count: int = 300) -> float:
    """CPU seconds of one health check, sent and answered by the same process: an upper bound."""

    async def app(scope: dict, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    listener = listen("127.0.0.1")
    async with serving(app, listener), httpx.AsyncClient(timeout=None) as http:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        began = time.process_time()
        for _ in range(count):
            (await http.get(url)).raise_for_status()
        return (time.process_time() - began) / count


def play(url: str, folder: str) -> None:
    """The other process: workers and trainer."""
    asyncio.run(_play(url, Path(folder)))


async def _play(url: str, folder: Path) -> None:
    async with httpx.AsyncClient(base_url=url, headers=with_key(KEY), timeout=60) as http:

        async def post(route: str, message: object, answer: type) -> object:
            reply = (await http.post(route, content=encode(message))).raise_for_status()
            return decode(reply.content, answer)

        async with asyncio.TaskGroup() as group:
            versions = {"now": 0}
            group.create_task(_play_trainer(post, folder, versions))
            for worker in range(8):
                group.create_task(_play_worker(post, f"w{worker}", versions))


async def _play_worker(post, name: str, versions: dict[str, int]) -> None:
    while not (order := await post("/work", WorkRequest(name, slots=64, wait_s=5.0), WorkOrder)).stop:
        for task in order.tasks:
            await post("/groups", GroupReport(name, _result(task, versions["now"])), Ack)


async def _play_trainer(post, folder: Path, versions: dict[str, int]) -> None:
    step = 0
    while (order := await post("/order", OrderRequest(step, wait_s=5.0), Order)).kind != "stop":
        if order.kind == "sync":
            versions["now"] = step
            await post("/weights", WeightsReport(step, order.servers), Ack)
            probe = await post("/probe", ProbeRequest(step, wait_s=5.0), ProbeOrder)
            if probe.plan_file:
                await post("/probed", ProbeReport(step, {}), Ack)
        elif order.kind == "train":
            await post("/step", StepReport(step, {"loss": 0.0}), Ack)
            step += 1
        elif order.kind == "save":
            staging = folder / "checkpoints" / f".step_{step:06d}.part"
            staging.mkdir(parents=True)
            await post("/saved", SavedReport(step, str(staging)), Ack)


def _result(task: GroupTask, version: int) -> GroupResult:
    rollouts = tuple(
        RolloutSummary(
            f"{task.uid}.{i}", f"rollouts/{task.uid}.safetensors", i, PROMPT, COMPLETION, COMPLETION, COMPLETION // 2,
            8 * COMPLETION,
            COMPLETION, PROMPT + COMPLETION - 1, float(i % 2), "stop", version, version,
        )
        for i in range(task.num_samples)
    )  # fmt: skip
    return GroupResult(task.uid, task.prompt_index, task.attempt, task.server, rollouts, seconds=60.0)


def measure_worker(rollouts: int) -> dict[str, float]:
    """CPU time from the bytes that a server sends to the payload file.

    For a model of Kimi-K2's size: 60 MoE layers, 8 of 384 experts.
    """
    contract = ModelContract(vocab_size=163840, moe_layers=tuple(range(1, 61)), num_experts=384, experts_per_token=8)
    body = json.dumps(_response(contract, np.random.default_rng(0))).encode()
    sampling = Sampling(temperature=1.0, top_p=0.95, top_k=512, max_new_tokens=COMPLETION)
    rules = EpisodeRules(sampling, (), max_sequence_length=PROMPT + COMPLETION)
    parts = dict.fromkeys(("decode", "check", "write"), 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        for n in range(rollouts):
            clock = time.process_time()
            policy = _SameResponse(body, tuple(range(1, 61)))
            rollout = asyncio.run(run_episode(f"g{n}.0", "", list(range(PROMPT)), policy, _NoText(), rules))
            clock = _lap(parts, "decode", clock)
            check_rollout(rollout, contract)
            summary_of(rollout, "rollouts/g.safetensors", 0, contract)
            clock = _lap(parts, "check", clock)
            payload_bytes = write_payload(Path(scratch) / "g.safetensors", [rollout])
            _lap(parts, "write", clock)
    total = sum(parts.values()) / rollouts
    return {
        "worker_cpu_s_per_1000_rollouts": 1000 * total,
        **{f"worker_{name}_cpu_s_per_1000_rollouts": 1000 * value / rollouts for name, value in parts.items()},
        "worker_bytes_received_per_1000_rollouts": 1000.0 * len(body),
        "worker_bytes_written_per_1000_rollouts": 1000.0 * payload_bytes,
        "worker_cores_per_server": total * TOKENS_PER_S / COMPLETION,
    }


def _lap(parts: dict[str, float], name: str, since: float) -> float:
    now = time.process_time()
    parts[name] += now - since
    return now


class _SameResponse:
    """A policy that decodes the same bytes for each request."""

    def __init__(self, body: bytes, moe_layers: tuple[int, ...]):
        self._body, self._moe_layers = body, moe_layers

    async def generate(self, prompt_ids: object, sampling: Sampling, request_id: str, stop_token_ids: object = ()):
        choice = json.loads(self._body)["choices"][0]
        return decode_completion(request_id, choice, [[0, 0]], sampling, "native", self._moe_layers)


class _NoText:
    def decode(self, ids: object) -> str:
        return ""


def _response(contract: ModelContract, rng: np.random.Generator) -> dict:
    """Keep-sets of the published shape: half of them of one token, 8 tokens on average. It includes routes of the dense layer."""
    sizes = np.where(rng.random(COMPLETION) < 0.5, 1, 1 + rng.geometric(1 / 14, COMPLETION))
    sets = [rng.choice(contract.vocab_size, int(size), replace=False).tolist() for size in sizes]
    tokens = [chosen[0] for chosen in sets]
    rows, wide = PROMPT + COMPLETION - 1, contract.num_moe_layers + 1
    first = rng.integers(0, contract.num_experts, (rows, wide, 1))
    routes = ((first + np.arange(contract.experts_per_token) * 7) % contract.num_experts).astype(np.uint16)
    file = io.BytesIO()
    np.save(file, routes)
    logprobs = np.where(sizes == 1, 0.0, -rng.random(COMPLETION))
    content = [
        {"token": f"token_id:{t}", "logprob": float(p), "bytes": None, "top_logprobs": []}
        for t, p in zip(tokens, logprobs, strict=True)
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop", "token_ids": tokens, "sampling_mask": sets,
              "routed_experts": base64.b64encode(file.getvalue()).decode()}  # fmt: skip
    return {"choices": [choice]}


def measure_weight_planning() -> dict[str, float]:
    """The buckets of one update: 60 layers of 384 experts with three matrices each."""
    specs = [
        TensorSpec(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", (2048, 7168), "bfloat16")
        for layer in range(1, 61)
        for expert in range(384)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    began = time.process_time()
    buckets = plan_buckets(specs, 64 << 20)
    return {
        "weight_plan_cpu_s": time.process_time() - began,
        "weight_plan_buckets": len(buckets),
        "weight_plan_tensors": len(specs),
    }


def report(numbers: dict[str, float], servers: int, disk_gb_per_s: float) -> str:
    n = numbers
    rate = servers * ROLLOUTS_PER_MINUTE / 60
    checks = n["health_checks_per_s"] * n["health_check_cpu_s"]  # cores; the same for every large fleet
    written_gb_per_s = rate * n["worker_bytes_written_per_1000_rollouts"] / 1e12
    return "\n".join([
        (f"orchestrator   {n['orchestrator_cpu_s_per_1000_rollouts']:.2f} CPU s per 1000 rollouts (with its HTTP), "
        f"{n['health_checks_per_s']:.0f} health checks/s of {1e3 * n['health_check_cpu_s']:.2f} ms"),
        (f"               {servers} servers at {ROLLOUTS_PER_MINUTE} rollouts a minute: {n['orchestrator_cores']:.2f} cores; "
        f"one core is enough for about {servers * (1 - checks) / (n['orchestrator_cores'] - checks):.0f} servers"),
        (f"worker         {n['worker_cpu_s_per_1000_rollouts']:.0f} CPU s per 1000 rollouts of {COMPLETION} tokens "
        f"(decode {n['worker_decode_cpu_s_per_1000_rollouts']:.0f}, check {n['worker_check_cpu_s_per_1000_rollouts']:.0f}, "
        f"write {n['worker_write_cpu_s_per_1000_rollouts']:.0f}); "
        f"{n['worker_bytes_received_per_1000_rollouts'] / 1e9:.2f} GB in, "
        f"{n['worker_bytes_written_per_1000_rollouts'] / 1e9:.2f} GB out"),
        (f"               next to a server of {TOKENS_PER_S} tokens/s: {n['worker_cores_per_server']:.2f} cores; "
        f"one core is enough for {TOKENS_PER_S / n['worker_cores_per_server']:.0f} tokens/s"),
        (f"spool          {n['spool_bytes_per_step'] / 1e9:.1f} GB per step of {n['rollouts_per_step']:.0f} rollouts; "
        f"{written_gb_per_s:.2f} GB/s from {servers} servers; "
        f"a filesystem of {disk_gb_per_s:g} GB/s is enough for {servers * disk_gb_per_s / written_gb_per_s:.0f} servers"),
        (f"weight update  {n['weight_plan_tensors']:.0f} tensors in {n['weight_plan_buckets']:.0f} buckets, "
        f"planned in {n['weight_plan_cpu_s']:.2f} CPU s"),
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4, help="simulated training steps of the orchestrator")
    parser.add_argument("--rollouts", type=int, default=5, help="responses that the worker decodes")
    parser.add_argument("--disk-gb-per-s", type=float, default=10.0, help="write bandwidth of the shared filesystem")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    if min(args.servers, args.steps, args.rollouts) < 1 or args.servers < 2:
        parser.error("--servers is at least 2, --steps and --rollouts at least 1")
    numbers = measure_orchestrator(args.servers, args.steps) | measure_worker(args.rollouts) | measure_weight_planning()
    numbers["rollouts_per_step"] = 256 * 16  # of model_configs/kimi-k2.toml
    numbers["spool_bytes_per_step"] = numbers["worker_bytes_written_per_1000_rollouts"] / 1000 * numbers["rollouts_per_step"]
    numbers["orchestrator_cores_2048"] = numbers["orchestrator_cores"] * 2048 / args.servers
    print(report(numbers, args.servers, args.disk_gb_per_s))
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
