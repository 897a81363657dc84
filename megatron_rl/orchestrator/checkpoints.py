"""RUN/checkpoints/step_000020: one consistent state of a run, read only if it is complete.

    engine/               the trainer's part, in Megatron's distributed format
    orchestrator.json     ledger and buffer; the size of every file of the trainer's part; a checksum of all this

A folder gets its name by a rename once it is complete, so that a killed save leaves none. Damage by a disk, a copy or a full
filesystem is found here, before any process starts from it.
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
    """Write the orchestrator's part next to the trainer's, and give the folder its final name.

    Args:
        staging: The folder with the trainer's part.
        final: Its final name; a folder of this name is replaced.
        step: Steps done.
        state: The orchestrator's state after them.
    """
    content = {"step": step, "files": _sizes(staging), **state.to_json()}
    write_atomically(staging / _OWN, json.dumps({**content, "checksum": _checksum(content)}).encode())
    if final.exists():
        shutil.rmtree(final)
    staging.rename(final)


def read_checkpoint(folder: Path, config: Config) -> RunState:
    """Read the orchestrator's state, and check that the folder is complete.

    Raises:
        BrokenCheckpointError: A file is missing, or differs from what was written.
    """
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
    """Read the latest complete checkpoint.

    A broken one is renamed and reported. An earlier one loses nothing: the steps in between are rerun from their recorded plans.

    Args:
        config: Of the run.
        folder: Of the run.
        say: Called with a line about each broken checkpoint.

    Returns:
        The state and the number of steps done; a new state and 0 where there is no checkpoint.
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
    """Path relative to the folder to size in bytes, of the trainer's part."""
    files = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return {str(file.relative_to(folder)): file.stat().st_size for file in files if file.name != _OWN}


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
