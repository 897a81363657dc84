"""RUN/status.json: progress and state of a run, for machines that cannot reach the orchestrator, such as a login node.

The orchestrator rewrites it every few seconds; it is stale when the run was killed. Its times are by the orchestrator's clock.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.errors import accessing
from megatron_rl.orchestrator import Orchestrator
from megatron_rl.records import write_atomically
from megatron_rl.wire.control import decode, encode

WRITE_EVERY_S = 2.0


@dataclass(frozen=True)
class RunStatus:
    """The content of RUN/status.json."""

    host: str
    pid: int
    """Of the orchestrator, on `host`."""
    running: bool
    """False: it has exited, with or without a failure."""
    step: int
    """Steps done."""
    steps: int
    version: int
    """Oldest policy version that a server samples with; -1: none does."""
    servers: dict[str, str]
    """URL to state."""
    stopping: bool
    failure: str
    written_at: float
    """Seconds since 1970."""


def write_status(orchestrator: Orchestrator, folder: RunFolder, *, running: bool) -> None:
    """Replace RUN/status.json."""
    now, context = orchestrator.status(), orchestrator.context
    status = RunStatus(
        host=socket.gethostname(),
        pid=os.getpid(),
        running=running,
        step=now.step,
        steps=context.config.run.steps,
        version=now.version,
        servers=now.servers,
        stopping=context.stop_requested,
        failure=str(context.failure or ""),
        written_at=time.time(),
    )
    write_atomically(folder.status_file, encode(status))


def read_status(folder: RunFolder) -> RunStatus | None:
    """Read RUN/status.json; None before the run's first start.

    Raises:
        ConfigError: The file is damaged.
    """
    if not folder.status_file.exists():
        return None
    try:
        with accessing(folder.status_file, "it is no file of a run; move it away"):
            return decode(folder.status_file.read_bytes(), RunStatus)
    except ValueError as error:
        raise ConfigError(
            f"{folder.status_file} is damaged: a running run rewrites it within {WRITE_EVERY_S:g} s; else delete the file"
        ) from error


@contextlib.asynccontextmanager
async def keeping_status(orchestrator: Orchestrator, folder: RunFolder) -> AsyncIterator[None]:
    """Keep RUN/status.json current inside the block, and record at its end that the run has exited."""

    async def keep() -> None:
        while True:
            with contextlib.suppress(OSError):  # other writers report that the disk is full
                write_status(orchestrator, folder, running=True)
            await asyncio.sleep(WRITE_EVERY_S)

    task = asyncio.create_task(keep(), name="status")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(OSError):
            write_status(orchestrator, folder, running=False)
