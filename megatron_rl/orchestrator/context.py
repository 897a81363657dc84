"""The state of a run that the three parts of the orchestrator share: worker handlers, trainer handlers, supervisor."""

import asyncio

from megatron_rl.batching import Spool
from megatron_rl.config import Config, RunFolder
from megatron_rl.errors import RunError
from megatron_rl.orchestrator.changes import Changes
from megatron_rl.orchestrator.fleet import Fleet
from megatron_rl.orchestrator.observer import Observer
from megatron_rl.orchestrator.probes import Probe
from megatron_rl.orchestrator.state import RunState
from megatron_rl.orchestrator.watchdog import Watchdog


class RunFailedError(RunError, RuntimeError):
    """The run cannot continue; the message names what failed and what can be done."""


class RunContext:
    """One event loop reads and writes it, so it needs no lock; who changes it calls `changes.notify()`."""

    def __init__(
        self, config: Config, folder: RunFolder, state: RunState, fleet: Fleet, observe: Observer, step: int = 0
    ) -> None:
        self.config, self.folder, self.state, self.fleet, self.observe = config, folder, state, fleet, observe
        self.spool = Spool(folder.path)
        self.changes = Changes()
        self.watchdog = Watchdog(config.run.stall_after_s)
        self.step = step
        """The step that the trainer does next; also the version of its weights."""
        self.saved_step = step
        """The step of the latest checkpoint, or the start: a run that stops here loses nothing."""
        self.stop_requested = False
        self.failure: RunFailedError | None = None
        """Why the run cannot continue; None while it can."""
        self.probe: Probe | None = None
        """The probe that is being sampled or scored."""
        self.syncing: tuple[str, ...] = ()
        """URLs of the servers in a weight update whose end the trainer has not reported yet."""

    def fail(self, reason: str) -> None:
        """End the run: the trainer gets the order to stop, `Orchestrator.run` raises RunFailedError. The first reason counts."""
        self.failure = self.failure or RunFailedError(reason)
        self.stop_requested = True

    def request_stop(self) -> None:
        """Ctrl-C: finish the step in progress, save, stop."""
        self.stop_requested = True
        asyncio.get_running_loop().create_task(self.changes.notify())
