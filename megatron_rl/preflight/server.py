"""The stage `sync`: one weight update of a real inference server; rollouts are sampled from it and scored by the ranks."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.inference.engine import InferenceEngine, ServerSettings
from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.registry import engine_of
from megatron_rl.preflight import ranks
from megatron_rl.preflight.faults import injected_fault
from megatron_rl.preflight.results import Measurement
from megatron_rl.preflight.sequences import write_plan
from megatron_rl.preflight.shrink import SAMPLING
from megatron_rl.preflight.subject import Subject
from megatron_rl.processes import Child, Command, ProcessError, free_ports, stop_all
from megatron_rl.records import Rollout, Sampling, check_rollout
from megatron_rl.rollouts.episode import EpisodeRules, run_episode
from megatron_rl.wire.access import KEY_VARIABLE

VERSION = 1
START_TIMEOUT_S = 240
_NUM_PROBES = 12
_PROBES = 2
"""Number of the probes' step plan, and its step: no token may be newer than it."""


def why_no_server(subject: Subject) -> str | None:
    """Why no server can run on this machine; None if it can."""
    return engine_of(subject.config).why_not_comparable(subject.table.architecture)


@contextmanager
def running_server(subject: Subject) -> Iterator[Child]:
    """A server of the small model with dummy weights. It starts in the background; `url_of` gives its address."""
    config, port = subject.config, free_ports(1)[0]
    settings = ServerSettings(
        model_folder=str(subject.model_folder),
        host=config.servers.host,
        port=port,
        device="cpu",
        dtype="float32",
        max_sequence_length=config.model.max_sequence_length,
        max_num_seqs=_NUM_PROBES,
        keep_set_source="processed_logprobs",
        has_moe_layers=bool(subject.table.architecture.moe_layers),
        max_keep_set=config.rollouts.max_keep_set,
        weight_transport="gloo",
        key=secrets.token_hex(16),
        seed=config.run.seed,
        kv_cache_gib=0.1,
        gpu_memory_utilization=0.1,
    )
    argv, env = engine_of(config).server_command(settings)
    child = Child(Command("server", argv, subject.folder / "server.log", env))
    try:
        yield child
    finally:
        stop_all([child], grace_s=5.0)


def sync(subject: Subject, layout_pool: RankPool, server: Child, fault: str | None) -> list[Measurement]:
    """Updates the server with the ranks' weights, and compares what it samples with what the ranks score.

    Args:
        subject: The small model and its sequences.
        layout_pool: Processes for the ranks of the subject's layout.
        server: Result of `running_server`.
        fault: Fault to inject; None injects nothing.

    Returns:
        Whether all tokens are of the version that was sent, and the mean difference of log-probs.

    Raises:
        ProcessError: The server does not start or does not hold the weights.
    """
    url, key = url_of(server), server.command.env[KEY_VARIABLE]
    _wait_until_healthy(engine_of(subject.config), server, url)
    failed = layout_pool.run(ranks.publish, subject, subject.config, fault, url, key, VERSION)[0]
    if failed:
        raise ProcessError(f"the server does not hold the weights: {failed[url]}")
    probes = asyncio.run(_sample(subject, url, key))
    with injected_fault(fault):  # a step plan is written and read as in a run
        plan = write_plan(subject.folder, _PROBES, probes)
    answers = layout_pool.run(ranks.scores_of, subject, subject.config, fault, plan)
    found = {number: values for part in answers for number, values in part.items()}
    d = np.concatenate(
        [np.abs(values.astype(np.float64) - probes[n].logprobs[probes[n].loss_mask]) for n, values in found.items()]
    )
    versions = {int(v) for probe in probes for v in probe.policy_versions}
    return [
        Measurement("tokens of another version than the one sent", float(versions != {VERSION}), 0),
        Measurement(f"|log p - vLLM's|, mean of {len(d)} sampled tokens", float(d.mean()), subject.config.probe_tolerance),
    ]


def url_of(server: Child) -> str:
    """The address that a server listens on."""
    argv = list(server.command.argv)
    return f"http://{argv[argv.index('--host') + 1]}:{argv[argv.index('--port') + 1]}"


def _wait_until_healthy(engine: InferenceEngine, server: Child, url: str) -> None:
    async def check() -> None:
        async with httpx.AsyncClient(timeout=5) as http:
            await engine.check_health(http, url)

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ProcessError(server.failure())
        try:
            return asyncio.run(check())
        except (httpx.HTTPError, ServerError):
            time.sleep(0.2)
    raise ProcessError(f"the server did not start within {START_TIMEOUT_S} s; see the end of its log: {server.command.log_file}")


async def _sample(subject: Subject, url: str, key: str) -> list[Rollout]:
    """Random prompts, sampled as in training."""
    random = np.random.default_rng(_PROBES)
    contract = subject.table.architecture.contract
    prompts = [random.integers(0, contract.vocab_size, int(random.integers(2, 24))).tolist() for _ in range(_NUM_PROBES)]
    client = engine_of(subject.config).sampling_client(
        url, contract, key=key, keep_set_source="processed_logprobs", max_keep_set=SAMPLING.top_k, timeout_s=120
    )
    rules = EpisodeRules(SAMPLING, (), max_sequence_length=subject.config.model.max_sequence_length)
    untruncated = replace(rules, sampling=Sampling(temperature=SAMPLING.temperature, max_new_tokens=SAMPLING.max_new_tokens))
    try:
        episodes = [
            run_episode(f"probe.{n}", "", prompt, client, _NoText(), untruncated if n == 0 else rules)
            for n, prompt in enumerate(prompts)
        ]
        rollouts = await asyncio.gather(*episodes)
    finally:
        await client.close()
    for rollout in rollouts:
        check_rollout(rollout, contract)
    return rollouts


class _NoText:
    """Stands in for a tokenizer: the small model has none, and single turns do not need one."""

    def decode(self, ids: object) -> str:
        return ""

    def continuation(self, text: str) -> tuple[int, ...]:
        raise AssertionError("a single turn has no continuation")

    def whole_text(self, ids: object) -> str:
        raise AssertionError("there are no stop strings")
