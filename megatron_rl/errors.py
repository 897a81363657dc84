"""The two kinds of errors of this package; every error class of its own is one of them.

    UserError   the user can fix it: a value, a file, a command. The command line prints the message alone.
    RunError    a run met a fault: a process, a server, a disk, a peer. The command line prints the message and where the logs
    are.

A message names the value, the rule and the remedy. Any other exception is a bug: it ends with its traceback.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """What a user can fix."""


class RunError(Exception):
    """A fault of a running program or of its machines."""


class FileAccessError(UserError, OSError):
    """A file or folder that the user named, and that cannot be read or written."""


def check_output_file(option: str, file: Path) -> None:
    """Return if the file can be in its folder; for the options of commands that work long before they write.

    Raises:
        FileAccessError: Its folder does not exist, or it is a folder itself.
    """
    if not file.parent.is_dir() or file.is_dir():
        raise FileAccessError(f"{option} {file}: no file can be written there; give one in an existing folder")


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def lfs_pointer(file: Path) -> str | None:
    """What to say of a file of a downloaded folder that is only a pointer of Git LFS; None: it is not one."""
    try:
        with open(file, "rb") as stream:
            if stream.read(len(_LFS_POINTER)) != _LFS_POINTER:
                return None
    except OSError:
        return None
    return f"{file} is a pointer of Git LFS, and not the file itself; run `git lfs pull` in {file.parent}, or fetch the file"


@contextlib.contextmanager
def accessing(path: Path, remedy: str = "") -> Iterator[None]:
    """Inside, an OSError (no permission, disk full, not there) becomes a FileAccessError that names the file.

    Args:
        path: What is read or written; named where the OSError itself names no file.
        remedy: What the user can do, appended to the message.

    Raises:
        FileAccessError: In place of any OSError that is not a UserError or a RunError already.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except OSError as error:
        where = error.filename or path
        raise FileAccessError(f"{where}: {error.strerror or error}{f'; {remedy}' if remedy else ''}") from error
