"""RUN/checkpoints/step_000020: one consistent cut of a run, which is read only when it is complete.

    engine/               the trainer's part, in Megatron's distributed format
    orchestrator.json     ledger and buffer; the size of every file of the trainer's part; a checksum of all this

A folder gets its name by a rename when all of it is there, so that a killed save leaves none. What a disk, a copy or a full
filesystem did to it later shows here, before any process is started from it.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, RunFolder
from megatron_rl.errors import RunError
from megatron_rl.orchestrator.state import RunState
from megatron_rl.records import write_atomically

_OWN = "orchestrator.json"


class BrokenCheckpointError(RunError, RuntimeError):
    """A checkpoint that differs from what was written; the message names the file."""


def seal_checkpoint(staging: Path, final: Path, step: int, state: RunState) -> None:
    """Put the orchestrator's part next to the trainer's in `staging`, and give the folder its name."""
    content = {"step": step, "files": _sizes(staging), **state.to_json()}
    write_atomically(staging / _OWN, json.dumps({**content, "checksum": _checksum(content)}).encode())
    if final.exists():
        shutil.rmtree(final)
    staging.rename(final)


def read_checkpoint(folder: Path, config: Config) -> RunState:
    """The orchestrator's state, once the whole folder is found complete. Raises BrokenCheckpointError."""
    file = folder / _OWN
    try:
        content = json.loads(file.read_bytes())
        written = content.pop("checksum", None)
        if written is not None and written != _checksum(content):
            raise BrokenCheckpointError(f"{file}: its content differs from what was written (checksum)")
        sizes = content.pop("files", {})
        state = RunState.from_json(config, content)
    except OSError as error:
        raise BrokenCheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise BrokenCheckpointError(f"{file}: not a complete state of a run ({type(error).__name__}: {error})") from error
    there = _sizes(folder)
    wrong = [
        f"{name} has {there.get(name, 'no')} bytes; {size} were written"
        for name, size in sizes.items()
        if there.get(name) != size
    ]
    if wrong:
        raise BrokenCheckpointError(f"{folder}: {'; '.join(wrong[:5])}{f'; and {len(wrong) - 5} more' if wrong[5:] else ''}")
    return state


def restore(config: Config, folder: RunFolder, say: Callable[[str], None]) -> tuple[RunState, int]:
    """State and step of the latest complete checkpoint; a new state where there is none.

    A broken one is renamed and reported. Nothing is lost by going further back: the steps in between are done
    again from their recorded plans.
    """
    for step, path in reversed(folder.complete_checkpoints()):
        try:
            return read_checkpoint(path, config), step
        except BrokenCheckpointError as error:
            renamed = path.with_name(f"broken_{path.name}")
            shutil.rmtree(renamed, ignore_errors=True)
            path.rename(renamed)
            say(f"{error}; it is renamed to {renamed.name}, and the checkpoint before it is used")
    return RunState.new(config), 0


def _sizes(folder: Path) -> dict[str, int]:
    """Of the trainer's part: path relative to the folder, to bytes."""
    files = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return {str(file.relative_to(folder)): file.stat().st_size for file in files if file.name != _OWN}


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
