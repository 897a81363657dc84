"""How a command ends on an error: what the terminal shows, where the traceback is, and the exit status.

UserError        its message; likewise for a disk that is full or may not be written     status 2
RunError         its message, and where the run's logs are                               status 1
anything else    one line; the traceback is appended to RUN/logs/error.log, or is
                 in a new file of the temporary folder where there is no run             status 1
"""

import contextlib
import errno
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click
import typer

from megatron_rl.config import RunFolder
from megatron_rl.errors import RunError, UserError

USER_ERROR, FAILURE = 2, 1
"""Exit statuses. click, too, ends with 2 on an option that it does not know."""

_DISK_FAULTS = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}


@dataclass
class ErrorReport:
    """What is known about the command when it fails."""

    run: RunFolder | None = None
    """The run that it is about; set as soon as it is known."""


@contextlib.contextmanager
def reporting_errors(run: RunFolder | None = None) -> Iterator[ErrorReport]:
    """Inside, every error ends the command as in the table at the top of this file. typer handles Ctrl-C and a closed pipe.

    Raises:
        typer.Exit: With the exit status.
    """
    report = ErrorReport(run)
    try:
        yield report
    except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
        raise
    except UserError as error:
        _show(str(error))
        raise typer.Exit(USER_ERROR) from error
    except RunError as error:
        logs = f"\nlogs: {report.run.logs}" if report.run and report.run.logs.is_dir() else ""
        _show(f"the run failed: {error}{logs}")
        raise typer.Exit(FAILURE) from error
    except OSError as error:
        if (message := disk_fault(error)) is None:
            _end_unexpected(error, report.run)
        _show(message)
        raise typer.Exit(USER_ERROR) from error
    except Exception as error:  # noqa: BLE001 - the outermost frame
        _end_unexpected(error, report.run)


def disk_fault(error: OSError) -> str | None:
    """The message for a disk that is full or may not be written, which a user can fix; None for another error."""
    if error.filename is None or error.errno not in _DISK_FAULTS:
        return None
    return f"{error.filename}: {error.strerror}"


def _end_unexpected(error: Exception, run: RunFolder | None) -> NoReturn:
    _show(f"unexpected {type(error).__name__}: {_first_line(error)}{_traceback_place(error, run)}")
    raise typer.Exit(FAILURE) from error


def _traceback_place(error: Exception, run: RunFolder | None) -> str:
    """Write the traceback, and say where it is; on the terminal where no file can be written."""
    text = "".join(traceback.format_exception(error))
    try:
        file = _error_log(run)
        with open(file, "a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}\n{text}\n")
    except OSError:
        return f"\n{text}"
    return f". Traceback: {file}"


def _error_log(run: RunFolder | None) -> Path:
    """RUN/logs/error.log, which `megatron-rl logs RUN error` prints; a new file in the temporary folder where RUN has no logs."""
    if run is not None and os.access(run.logs, os.W_OK):
        return run.logs / "error.log"
    descriptor, name = tempfile.mkstemp(prefix="megatron-rl-error-", suffix=".log")
    os.close(descriptor)
    return Path(name)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _show(message: str) -> None:
    typer.secho(f"megatron-rl: {message}", fg="red", err=True)
