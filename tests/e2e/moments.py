"""Waits from outside for a moment of a run: the creation of a file, by inotify."""

import ctypes
import os
import select
import struct
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_IN_CREATE = 0x100
_HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows


def wait_for_new_file(folder: Path, suffix: str, timeout_s: float) -> str:
    """Return as soon as a file or folder whose name ends in `suffix` is created in `folder`, with its name."""
    descriptor = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    try:
        watch = _LIBC.inotify_add_watch(descriptor, os.fsencode(folder), _IN_CREATE)
        assert watch >= 0, os.strerror(ctypes.get_errno())
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if select.select([descriptor], [], [], 1.0)[0]:
                for name in _names(os.read(descriptor, 65536)):
                    if name.endswith(suffix):
                        return name
    finally:
        os.close(descriptor)
    raise AssertionError(f"no new *{suffix} in {folder} within {timeout_s} s")


def _names(events: bytes) -> list[str]:
    names, at = [], 0
    while at < len(events):
        *_, length = _HEAD.unpack_from(events, at)
        at += _HEAD.size
        names.append(events[at : at + length].rstrip(b"\0").decode())
        at += length
    return names
