"""A row of values a step, as the sinks write it, and metrics.jsonl, in which a run keeps its rows."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from megatron_rl.errors import accessing

Phase = Literal["train", "supervised"]


@dataclass(frozen=True)
class Row:
    """The values of one step."""

    step: int
    values: Mapping[str, float]
    phase: Phase = "train"
    seconds: float = 0.0
    """Since the row before it, or since the start of the process."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""


class JsonLines:
    """metrics.jsonl: {"phase": ..., "step": ..., "seconds": ..., "time": ..., name: value, ...}, one line a step, flushed.

    A value that is not finite is written as null, which every JSON reader accepts. A resumed run appends to the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115 - open until close()
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")  # the previous process died within a line

    def write(self, row: Row) -> None:
        """Append the row."""
        head = {"phase": row.phase, "step": row.step, "seconds": round(row.seconds, 3), "time": round(row.time, 3)}
        values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
        self._file.write(json.dumps(head | values).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path, phase: Phase = "train") -> list[Row]:
    """The rows of a phase by rising step; of a step that a resumed run has repeated the last.

    A line that is not a complete row, such as one cut by a crash, is ignored.

    Raises:
        FileAccessError: The file cannot be read.
    """
    rows: dict[int, Row] = {}
    with accessing(path):
        lines = path.read_bytes().splitlines()
    for line in lines:
        row = _parse(line)
        if row is not None and row.phase == phase:
            rows[row.step] = row
    return [rows[step] for step in sorted(rows)]


def damaged_lines(path: Path) -> list[int]:
    """Numbers, from 1, of the lines that are not a complete row; a last line without newline is still being written."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [number for number, line in enumerate(lines, 1) if line and _parse(line) is None]


def series(rows: Sequence[Row], name: str) -> list[float]:
    """The values of one metric, of the rows that have it."""
    return [row.values[name] for row in rows if name in row.values]


def _parse(line: bytes) -> Row | None:
    try:
        record = json.loads(line)
        phase = cast("Phase", str(record.pop("phase")))
        step, seconds, at = int(record.pop("step")), float(record.pop("seconds")), float(record.pop("time"))
        values = {name: float("nan") if value is None else float(value) for name, value in record.items()}
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        return None
    return Row(step, values, phase, seconds, at)


def _ends_with_newline(path: Path) -> bool:
    return path.read_bytes()[-1:] == b"\n"
