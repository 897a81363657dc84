"""One child process: started in its own session, watched, stopped with all processes that it started."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_rl.errors import RunError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Command:
    """A process to start: argv, additions to the environment, the file for its output."""

    name: str
    argv: Sequence[str]
    log_file: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stop_signal: int = signal.SIGTERM
    """The signal that ends it. If it is not SIGTERM, the process ignores SIGTERM, which a batch system sends to every process of
    a job that is cancelled or preempted, and which one process handles for all; the program calls `ignore_sigterm` at its
    start."""


class ProcessError(RunError, RuntimeError):
    """A process that could not be started, or that ended unexpectedly; with its name and the end of its log."""


class Process(Protocol):
    """A started process, on this machine (`Child`) or on another one."""

    @property
    def name(self) -> str:
        """As in logs/NAME.log."""

    def poll(self) -> int | None:
        """None while it runs, else its exit status."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it, and all processes that it started and that still run."""

    def failure(self) -> str:
        """Why it ended, for a person."""


class Child:
    """A child process on this machine.

    It has its own session, so that Ctrl-C on the terminal reaches only the parent, which then stops its children in order. The
    kernel sends it its stop signal when the parent dies, so that even a kill -9 of the parent leaves no child running.

    Raises:
        ProcessError: It could not be started.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        command.log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(command.log_file, "ab", opener=lambda p, flags: os.open(p, flags, 0o600)) as log:
            try:
                self._process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **command.env},
                    start_new_session=True,
                    preexec_fn=kill_with_parent(command.stop_signal),  # noqa: PLW1509 - a few system calls, no lock
                )
            except OSError as error:
                raise ProcessError(
                    f"{command.name}: could not be started ({error}); its command was {' '.join(command.argv)}"
                ) from error

    @property
    def name(self) -> str:
        """Of its command."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its session."""
        return self._process.pid

    def poll(self) -> int | None:
        """None while it runs, else its exit status."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None when it still runs after timeout_s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode

    def terminate(self) -> None:
        """Ask the process to end; it ends its own children."""
        if self.poll() is None:
            self._process.send_signal(self.command.stop_signal)

    def kill(self) -> None:
        """End every process of its session, also children that outlived it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def failure(self) -> str:
        """Why it ended, for a person: name, status, the last lines of its log."""
        status = self.poll()
        how = (
            f"was killed by signal {-status} ({signal.Signals(-status).name})"
            if status is not None and status < 0
            else f"ended with status {status}"
        )
        return f"{self.name} {how}; the end of {self.command.log_file}:\n{log_tail(self.command.log_file)}"


def stop_all(children: Sequence[Child], grace_s: float) -> None:
    """Ask all to end, wait at most grace_s for them together, then kill the rest. Returns when none runs."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill()


def log_tail(path: Path, num_lines: int = 15) -> str:
    """The last lines of a log, read from its end."""
    try:
        with open(path, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 200 * num_lines))
            lines = f.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"  (no log: {error})"
    return "\n".join(f"  {line}" for line in lines[-num_lines:])


def ignore_sigterm() -> None:
    """Ignore SIGTERM in this process, but not in those that it starts.

    For a program whose Command has another stop_signal. The processes that it starts, such as a reward's, still end by SIGTERM:
    an ignored signal would stay ignored there, a handled one does not.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        return  # started by hand
    signal.signal(signal.SIGTERM, lambda *_: None)  # exec restores the default action, and the next line does after a fork
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def end_forks_with_me() -> None:
    """Have all later forks of this process (dist-checkpointing forks its writers) killed when this process dies."""
    forking: list[int] = [0]

    def remember() -> None:
        forking[0] = os.getpid()

    def follow() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != forking[0]:  # it died before prctl
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=follow)


def kill_with_parent(stop_signal: int = signal.SIGTERM) -> Callable[[], None]:
    """A preexec_fn for subprocess: the kernel sends the child this signal when this process dies; see Command.stop_signal."""
    parent = os.getpid()

    def between_fork_and_exec() -> None:
        # A handler of the parent's (asyncio's) would swallow the one signal that the kernel sends, were the parent to die before
        # exec.
        signal.signal(stop_signal, signal.SIG_DFL)
        if stop_signal != signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _LIBC.prctl(_PR_SET_PDEATHSIG, stop_signal)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return between_fork_and_exec
