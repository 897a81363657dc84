"""The rollout worker process: `python -m megatron_rl.rollouts.worker RUN_DIR --orchestrator URL`.

    orchestrator ──WorkOrder──▶ run() ──one coroutine a group──▶ GroupSampler ──payload file──▶ spool
          ▲                                                          │
          └───────────────────────GroupReport────────────────────────┘

run() asks for as many groups as it has free slots and waits in the request until there are some; each group ends with its report.
It ends when an order says stop (groups in flight are cancelled, and with them their requests), and with an error when the
orchestrator has not answered for a long time. The run's key comes in the environment variable MEGATRON_RL_KEY.
"""

import argparse
import asyncio
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TypeVar

import httpx

from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.inference.registry import engine_of
from megatron_rl.inference.sampled_model import read_sampled_model
from megatron_rl.processes import ignore_sigterm
from megatron_rl.records import GroupTask
from megatron_rl.rollouts.group import GroupSampler
from megatron_rl.tasks import TaskError, TextEncoder, load_task
from megatron_rl.wire.access import KeyMissingError, key_from_environment, with_key
from megatron_rl.wire.control import Ack, GroupReport, WorkOrder, WorkRequest, decode, encode
from megatron_rl.wire.nodes import ADDRESS_VARIABLE
from megatron_rl.wire.stores import address_towards

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_GROUPS = 512
"""In flight in one worker; the orchestrator sends what the staleness bound and the servers admit."""


class OrchestratorGoneError(RuntimeError):
    """The orchestrator has not answered for so long that it must be dead, or it refuses this worker."""


class OrchestratorLink:
    """Messages to the orchestrator, sent again while it is briefly away. patience_s: how long away still is brief."""

    def __init__(self, url: str, key: str, *, patience_s: float = 30.0, retry_s: float = 0.5):
        self._url, self._patience_s, self._retry_s = url, patience_s, retry_s
        to = httpx.URL(url)
        self.own_host = os.environ.get(ADDRESS_VARIABLE) or address_towards(to.host, to.port or 80)
        """This machine's address in the run: on a cluster the one that its agent found, else that on the way there."""
        self._http = httpx.AsyncClient(
            base_url=url, headers=with_key(key), timeout=httpx.Timeout(60.0, connect=5.0), trust_env=False
        )

    async def send(self, path: str, message: object, answer: type[T]) -> T:
        """Raises OrchestratorGoneError. A message may arrive twice; the orchestrator knows a group's report by its uid."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                response = await self._http.post(path, content=encode(message), headers={"content-type": "application/json"})
                if response.status_code == 200:
                    return decode(response.content, answer)
                fault = f"HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code < 500:  # it is there and refuses: no later attempt will fare better
                    raise OrchestratorGoneError(f"{self._url}{path}: {fault}")
            except httpx.HTTPError as error:
                fault = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise OrchestratorGoneError(f"{self._url}{path}: no answer for {self._patience_s:g} s, the last time: {fault}")
            await asyncio.sleep(self._retry_s)

    async def close(self) -> None:
        await self._http.aclose()


class Worker:
    def __init__(self, name: str, sampler: GroupSampler, link: OrchestratorLink):
        self._name, self._sampler, self._link = name, sampler, link
        self._groups: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until told to stop. Raises OrchestratorGoneError, and whatever a group raised that is not a known failure."""
        try:
            while True:
                await self._wait_for_a_slot()
                request = WorkRequest(self._name, slots=MAX_GROUPS - len(self._groups), host=self._link.own_host)
                order = await self._link.send("/work", request, WorkOrder)
                if order.stop:
                    return
                for group in order.tasks:
                    self._groups.add(asyncio.create_task(self._sample_and_report(group), name=group.uid))
        finally:
            for task in self._groups:
                task.cancel()
            await asyncio.gather(*self._groups, return_exceptions=True)

    async def _wait_for_a_slot(self) -> None:
        """Also takes leave of the groups that have ended; an unexpected error of one of them surfaces here."""
        if len(self._groups) >= MAX_GROUPS:
            await asyncio.wait(self._groups, return_when=asyncio.FIRST_COMPLETED)
        ended = {task for task in self._groups if task.done()}
        self._groups -= ended
        for task in ended:
            task.result()

    async def _sample_and_report(self, group: GroupTask) -> None:
        result = await self._sampler.sample(group)
        if result.failure:
            logger.warning("group %s on %s failed (%s): %s", group.uid, group.server, result.failure, result.message)
        await self._link.send("/groups", GroupReport(self._name, result), Ack)


async def work(folder: RunFolder, orchestrator: str, key: str, name: str) -> None:
    config = folder.config()
    text = TextEncoder(folder.model, config.task)
    model = read_sampled_model(folder.model, text.num_tokens)
    task = load_task(config.task, config.run.seed)
    sampler = GroupSampler(config, engine_of(config), model, task, text, folder.path / "spool", key)
    link = OrchestratorLink(orchestrator, key)
    logger.info("worker %s: keep-sets by %s, %d MoE layers", name, config.keep_set_source, len(model.moe_layers))
    try:
        await Worker(name, sampler, link).run()
    finally:
        await sampler.close()
        await link.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.rollouts.worker", description="Samples groups for one run.")
    parser.add_argument("run_dir", type=Path, help="the run's folder, with its config.toml")
    parser.add_argument("--orchestrator", required=True, metavar="URL")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}")
    args = parser.parse_args(argv)
    ignore_sigterm()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    try:
        key = key_from_environment()
    except KeyMissingError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        asyncio.run(work(RunFolder(args.run_dir), args.orchestrator, key, args.name))
    except (OrchestratorGoneError, TaskError, ConfigError) as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
