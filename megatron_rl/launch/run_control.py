"""`megatron-rl status`, `stop`, `servers` and `logs`: they reach a run through the files in its folder."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.errors import accessing
from megatron_rl.launch.slurm import Job, call_slurm, job_of, job_state
from megatron_rl.launch.slurm_job import STOP
from megatron_rl.launch.status import WRITE_EVERY_S, RunStatus, read_status
from megatron_rl.orchestrator import ServersRequest, ask

SILENT_S = 10 * WRITE_EVERY_S
"""The orchestrator of an older status was killed, or hangs."""


def status_text(folder: RunFolder) -> str:
    """Progress and state of the run, for a person.

    Raises:
        ConfigError: There is no run in the folder, or its status cannot be read.
    """
    job = job_of(folder)
    about_job = [_job_line(job)] if job else []
    if job and read_status(folder) is None:
        return "\n".join([f"{folder.path}: its orchestrator has not started yet", *about_job])
    status = _status(folder)
    lines = [f"{folder.path}: step {status.step} of {status.steps}, {_state(status)} (process {status.pid} on {status.host})"]
    if status.failure:
        lines.append(f"failure: {status.failure}")
    if status.running:
        lines.append(f"servers, the oldest policy version among those ready is {status.version}:")
        lines += [f"  {url}: {state}" for url, state in status.servers.items()]
    latest = folder.latest_checkpoint()
    lines.append(f"latest checkpoint: {latest[1] if latest else 'none'}")
    return "\n".join(lines + about_job)


def stop_run(folder: RunFolder) -> str:
    """Have the run finish its step, save and exit.

    Returns:
        What was done, for a person.

    Raises:
        ConfigError: There is no run in the folder, or it cannot be reached from here.
    """
    if job := job_of(folder):
        return _stop_job(folder, job)
    status = _status(folder)
    if not status.running:
        return f"{folder.path} is not running"
    if status.host != socket.gethostname():
        raise ConfigError(f"{folder.path} runs on {status.host}, and this is {socket.gethostname()}: run the same command there")
    if not _is_a_run(status.pid):
        return f"{folder.path} is not running: process {status.pid} has exited without stopping in order"
    os.kill(status.pid, signal.SIGTERM)
    return _stopping(folder)


def _stopping(folder: RunFolder) -> str:
    status = f"`megatron-rl status {folder.path}` shows when the run has stopped"
    return f"{folder.path}: the step in progress is finished and saved; {status}"


def change_servers(folder: RunFolder, request: ServersRequest) -> str:
    """Add or remove servers of a running run.

    Returns:
        What was done, for a person.

    Raises:
        ConfigError: The run is not running.
        RequestError: The run refuses.
    """
    status = _status(folder)
    if not status.running:
        raise ConfigError(f"{folder.path} is not running: set servers.count, the number of servers that it starts with")
    return ask(folder, request)


def _job_line(job: Job) -> str:
    try:
        return f"job {job.number}: {job_state(job) or 'no longer known to Slurm'}"
    except ConfigError as error:  # the rest is known without Slurm
        return f"job {job.number}: {error}"


def _stop_job(folder: RunFolder, job: Job) -> str:
    match job_state(job):
        case None:
            return f"{folder.path} is not running: Slurm does not know job {job.number} any more"
        case "RUNNING":
            call_slurm("scancel", "--batch", f"--signal={STOP.name.removeprefix('SIG')}", job.number)
            return _stopping(folder)
        case state:
            call_slurm("scancel", job.number)
            return f"{folder.path}: job {job.number} was {state} and is cancelled"


def show_logs(folder: RunFolder, name: str | None, follow: bool, show: Callable[[str], None]) -> None:
    """Show a log of a run.

    Args:
        folder: Of the run.
        name: Of the log; None: events.
        follow: Continue as the log grows, until Ctrl-C.
        show: Called with the text.

    Raises:
        ConfigError: The folder has no run or no such log; the message lists the logs.
    """
    if not folder.config_file.exists() and not folder.logs.is_dir():
        raise ConfigError(f"{folder.path} holds no run: name the folder of one, such as runs/NAME")
    file = folder.logs / f"{name or 'events'}.log"
    if not file.exists():
        there = ", ".join(sorted(p.stem for p in folder.logs.glob("*.log"))) or "none yet"
        raise ConfigError(f"{folder.path} has no log {name or 'events'!r}; logs: {there}")
    with accessing(file), open(file, errors="replace") as log:
        while True:
            if text := log.read():
                show(text.removesuffix("\n"))
            if not follow:
                return
            time.sleep(0.5)


def _status(folder: RunFolder) -> RunStatus:
    if (status := read_status(folder)) is None:
        raise ConfigError(f"{folder.path} holds no run that was started: name the folder of a run, such as runs/NAME")
    return status


def _state(status: RunStatus) -> str:
    age_s = time.time() - status.written_at
    if not status.running:
        return "failed" if status.failure else ("finished" if status.step >= status.steps else "stopped")
    if age_s > SILENT_S:
        return f"silent for {age_s:.0f} s: killed, or its machine hangs"
    return "stopping" if status.stopping else "running"


def _is_a_run(pid: int) -> bool:
    """Whether the process is of this program, and not a later one with the same number."""
    try:
        return b"megatron" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
