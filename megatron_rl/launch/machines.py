"""Where the processes of a run start: on this machine, or on the nodes of a cluster. Everything else about a run is the same."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator import local_fleet, trainer_processes, worker_process
from megatron_rl.orchestrator.fleet import Fleet
from megatron_rl.processes import Child, Command, DevicePlan, Process, stop_all

GRACE_S = 10.0
"""How long trainer and workers have to exit by themselves at the end."""


class Machines(Protocol):
    """The machines of a run. What is started gets the orchestrator's URL and the run's key in its environment."""

    address: str
    """Where the orchestrator listens, and all machines reach it."""
    key: str
    """The run's key, in every message."""

    @property
    def handlers(self) -> Mapping[str, tuple[type, Callable]]:
        """Routes of the machines' own messages, which the orchestrator's server receives."""

    async def gather(self, url: str) -> None:
        """Tell the machines where the orchestrator is, and wait until all can start processes.

        Raises:
            ProcessError: Some did not join.
        """

    def fleet(self) -> Fleet:
        """The rollout servers; none starts before the fleet runs."""

    def start_workers(self, environment: Mapping[str, str]) -> list[Process]:
        """Start the workers, at least one, which together serve all servers."""

    def start_trainer(self, environment: Mapping[str, str], resume: bool) -> list[Process]:
        """Start all ranks."""

    async def stop_trainer(self) -> None:
        """End all ranks that still run, and return when none does."""

    async def stop(self) -> None:
        """End workers, ranks and agents, and return when none runs."""


class ThisMachine:
    """All processes are children of this one.

    Args:
        config: Of the run.
        folder: Of the run.
        plan: Which GPUs each process sees.
    """

    address = "127.0.0.1"
    handlers: Mapping[str, tuple[type, Callable]] = {}

    def __init__(self, config: Config, folder: RunFolder, plan: DevicePlan) -> None:
        self._config, self._folder, self._plan = config, folder, plan
        self.key = secrets.token_hex(16)
        self._workers: list[Child] = []
        self._ranks: list[Child] = []

    async def gather(self, url: str) -> None:
        """Do nothing: the children get the URL in their environment."""
        return

    def fleet(self) -> Fleet:
        """Servers on this machine."""
        return local_fleet(self._config, self._folder, self._plan, self.key)

    def start_workers(self, environment: Mapping[str, str]) -> list[Process]:
        """Start one worker."""
        return self._start(self._workers, [worker_process(self._folder, self._plan, environment)])

    def start_trainer(self, environment: Mapping[str, str], resume: bool) -> list[Process]:
        """Start all ranks."""
        return self._start(self._ranks, trainer_processes(self._config, self._folder, self._plan, environment, resume))

    async def stop_trainer(self) -> None:
        """End all ranks that still run."""
        ranks, self._ranks = self._ranks, []
        await asyncio.to_thread(stop_all, ranks, GRACE_S)

    async def stop(self) -> None:
        """End workers and ranks."""
        # In a thread: the orchestrator still answers those that exit.
        await asyncio.to_thread(stop_all, [*self._workers, *self._ranks], GRACE_S)

    def _start(self, children: list[Child], commands: Sequence[Command]) -> list[Process]:
        """Start one by one, so that those before one that cannot be started are known and can be stopped."""
        started: list[Process] = []
        for command in commands:
            children.append(child := Child(command))
            started.append(child)
        return started
