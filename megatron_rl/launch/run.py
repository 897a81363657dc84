"""A run from its start to its end: one process starts, controls and stops the others, here or on other nodes."""

import asyncio
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.config import Config, RunFolder
from megatron_rl.launch.machines import Machines
from megatron_rl.launch.observer import RunObserver
from megatron_rl.launch.status import keeping_status
from megatron_rl.orchestrator import Orchestrator, RunState, control_app, listen, restore, serving
from megatron_rl.orchestrator.context import RunContext
from megatron_rl.processes import Process


@dataclass(frozen=True)
class RunEnd:
    """How a run that did not fail ended."""

    finished: bool
    """All steps are done; else it was stopped, and --resume continues it."""
    signal: int | None
    """The signal that stopped it; None: none did."""


async def run(
    config: Config,
    folder: RunFolder,
    machines: Machines,
    *,
    resume: bool,
    stop_signals: Iterable[int],
    changes: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> RunEnd:
    """Train until the last step or one of the signals.

    Args:
        config: Of the run.
        folder: Of the run.
        machines: Where the processes start.
        resume: Continue from the latest checkpoint, where there is one.
        stop_signals: Numbers of the signals that stop the run.
        changes: In the configuration since the run was last running, one line each.
        notes: On what the policy reads, one line each.

    Raises:
        RunFailedError: The run cannot continue.
        ProcessError: The processes could not be started.
    """
    listener = listen(machines.address)
    url = f"http://{machines.address}:{listener.getsockname()[1]}"
    environment = {"MEGATRON_RL_ORCHESTRATOR": url, "MEGATRON_RL_KEY": machines.key, "HF_HUB_OFFLINE": "1"}
    with RunObserver(config, folder) as observer:
        for change in changes:
            observer.event(f"changed: {change}")
        for note in notes:
            observer.event(note)
        state, step = restore(config, folder, observer.event) if resume else (RunState.new(config), 0)
        observer.event(f"keep-sets: {config.keep_set_source}; weights over {config.transport}; device: {config.device}")
        orchestrator = Orchestrator(config, folder, state, machines.fleet(), observer, step)
        app = control_app(machines.key, {**orchestrator.handlers, **machines.handlers}, orchestrator.status)
        processes: list[Process] = []

        async def start_trainer_again() -> list[Process]:
            await machines.stop_trainer()
            return machines.start_trainer(environment, resume=True)

        stopping = _StopOnSignals(orchestrator.context, processes, stop_signals)
        async with serving(app, listener), keeping_status(orchestrator, folder):
            try:
                await machines.gather(url)
                processes += machines.start_workers(environment)
                processes += machines.start_trainer(environment, resume)
                await orchestrator.run(processes, start_trainer_again)
            finally:
                await machines.stop()
    end = RunEnd(finished=orchestrator.context.step >= config.run.steps, signal=stopping.signal)
    observer.summarise(_next_commands(config, folder, end, orchestrator.context.step))
    return end


def _next_commands(config: Config, folder: RunFolder, end: RunEnd, step: int) -> str:
    if not end.finished:
        return f"stopped after step {step} of {config.run.steps}; to continue: megatron-rl train {folder.config_file} --resume"
    export = f"the trained model, a Hugging Face folder: {folder.export}\n" if config.checkpoint.export else ""
    return f"{export}to look at the run: megatron-rl report {folder.path}"


class _StopOnSignals:
    """The first signal stops the run with a checkpoint; the second one at once."""

    def __init__(self, context: RunContext, processes: list[Process], signals: Iterable[int]) -> None:
        self.signal: int | None = None
        """The first that arrived."""
        self._context, self._processes = context, processes
        for number in signals:
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)

    def _stop(self, number: int) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.signal is None:
            self.signal = number
            again = " (again: stop at once)" if number == signal.SIGINT else ""
            self._context.observe.event(f"{signal.Signals(number).name}: the step in progress is finished and saved{again}")
            self._context.request_stop()
            return
        for process in self._processes:
            process.kill()
        self._context.fail("stopped at once by a second signal; --resume continues from the last checkpoint")


def _leave_terminal() -> None:
    """The terminal is closed: writing to it must not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
