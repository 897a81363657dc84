"""The rollout worker process: `python -m megatron_rl.rollouts.worker RUN_DIR --orchestrator URL`.

    orchestrator ──WorkOrder──▶ run() ──one coroutine a group──▶ GroupSampler ──payload file──▶ spool
          ▲                                                          │
          └───────────────────────GroupReport────────────────────────┘

run() asks for as many groups as it has free slots and waits in the request until there are some; each group ends with its report.
It ends when an order says stop (groups in flight and their requests are cancelled), and with an error when the orchestrator has
not answered for PATIENCE_S. The run's key comes in the environment variable MEGATRON_RL_KEY.
"""

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.inference.registry import engine_of
from megatron_rl.processes import ignore_sigterm
from megatron_rl.records import GroupTask, ModelContractError, read_model_contract
from megatron_rl.rollouts.group import GroupSampler
from megatron_rl.tasks import TaskError, TextEncoder, load_task
from megatron_rl.wire.access import KeyMissingError, key_from_environment
from megatron_rl.wire.client import AsyncControlClient, OrchestratorGoneError, own_address
from megatron_rl.wire.control import Ack, GroupReport, WorkOrder, WorkRequest

logger = logging.getLogger(__name__)

MAX_GROUPS = 512
"""Largest number of groups in flight in one worker; the staleness bound and the servers usually admit fewer."""

PATIENCE_S = 30.0
"""Seconds that the worker waits for an orchestrator that does not answer, before it exits."""


class Worker:
    """Samples the groups that the orchestrator assigns.

    Args:
        name: In reports and logs.
        sampler: Samples one group.
        orchestrator: The client of the control server.
    """

    def __init__(self, name: str, sampler: GroupSampler, orchestrator: AsyncControlClient) -> None:
        self._name, self._sampler, self._orchestrator = name, sampler, orchestrator
        self._host = own_address(orchestrator.url)
        self._groups: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Sample until an order says stop.

        Raises:
            OrchestratorGoneError: The orchestrator does not answer.
            Exception: An unexpected error of a group.
        """
        try:
            while True:
                await self._wait_for_a_slot()
                request = WorkRequest(self._name, slots=MAX_GROUPS - len(self._groups), host=self._host)
                order = await self._orchestrator.send("/work", request, WorkOrder)
                if order.stop:
                    return
                for group in order.tasks:
                    self._groups.add(asyncio.create_task(self._sample_and_report(group), name=group.uid))
        finally:
            for task in self._groups:
                task.cancel()
            await asyncio.gather(*self._groups, return_exceptions=True)

    async def _wait_for_a_slot(self) -> None:
        """Also removes the groups that have ended; an unexpected error of one of them is raised here."""
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
        await self._orchestrator.send("/groups", GroupReport(self._name, result), Ack)


async def work(folder: RunFolder, orchestrator: str, key: str, name: str) -> None:
    """Work for one run until the orchestrator says stop.

    Args:
        folder: The run's.
        orchestrator: URL of its control server.
        key: The run's.
        name: The worker's.
    """
    config = folder.config()
    text = TextEncoder(folder.model, config.task)
    contract = read_model_contract(folder.model_contract).limited_to(text.num_tokens)
    task = load_task(config.task, config.run.seed)
    sampler = GroupSampler(config, engine_of(config), contract, task, text, folder.path / "spool", key)
    client = AsyncControlClient(orchestrator, key, patience_s=PATIENCE_S)
    logger.info("worker %s: keep-sets by %s, %d MoE layers", name, config.keep_set_source, contract.num_moe_layers)
    try:
        await Worker(name, sampler, client).run()
    finally:
        await sampler.close()
        await client.close()


def main(argv: list[str] | None = None) -> int:
    """The process; returns its exit status."""
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
    except (OrchestratorGoneError, TaskError, ConfigError, ModelContractError) as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
