"""The display of a running run: live on a terminal, elsewhere one line a step."""

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.metrics.catalogue import CATALOGUE
from megatron_rl.metrics.rows import Row


class Display(Protocol):
    """What a run shows its progress on."""

    def step(self, row: Row) -> None:
        """Show a completed training step."""

    def progress(self, phase: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Show the progress of a phase without training steps: `done` of `total` units, and its latest values."""

    def say(self, text: str) -> None:
        """Print a line."""

    def close(self) -> None:
        """Release the terminal."""


def open_display(title: str, total_steps: int, console: Console | None = None) -> Display:
    """Live on a terminal; plain lines where stdout is a file or a pipe, and in CI."""
    console = console or Console()
    live = console.is_terminal and not os.environ.get("CI")
    return LiveDisplay(title, total_steps, console) if live else PlainDisplay(total_steps, console)


def wide_console() -> Console:
    """For tables: as wide as the terminal; without a terminal wide enough for any table."""
    return Console(width=None if Console().is_terminal else 200)


class Eta:
    """Estimates the remaining time from the last steps.

    A process's first row, which includes the start-up, counts only while it is the only one.

    Args:
        total_steps: Of the run.
        window: Number of last steps that count.
    """

    def __init__(self, total_steps: int, window: int = 10) -> None:
        self.total_steps = total_steps
        self._seconds: deque[float] = deque(maxlen=window)
        self._starting = True

    def after(self, row: Row) -> float:
        """Seconds from this row to the last step's end. Steps count from 0."""
        if not self._starting:
            self._seconds.append(row.seconds)
        self._starting = False
        return float(np.mean(self._seconds or [row.seconds])) * max(0, self.total_steps - row.step - 1)


def clock(seconds: float) -> str:
    """Formats a duration: 75 as '1:15', 3700 as '1:01:40'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, formatted value) of the measured values that the console shows."""
    return [
        (spec.console.label, spec.console.form.format(values[spec.plain_name]))
        for spec in CATALOGUE
        if spec.console is not None and spec.plain_name in values
    ]


class PlainDisplay:
    """One line a step, for log files."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._eta, self._console = Eta(total_steps), console

    def step(self, row: Row) -> None:
        """Print the step's line."""
        eta = clock(self._eta.after(row))
        parts = [f"step {row.step + 1}/{self._eta.total_steps}", *(f"{label} {text}" for label, text in shown(row.values))]
        self.say("  ".join([*parts, f"{row.seconds:.1f} s", f"ETA {eta}"]))

    def progress(self, phase: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Print a line at each tenth of the phase."""
        if done == total or done % max(1, total // 10) == 0:
            self.say("  ".join([f"{phase} {done}/{total}", *(f"{name} {value:.4g}" for name, value in values.items())]))

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Nothing is open."""


class LiveDisplay:
    """A progress bar and a table, redrawn in place; lines of text scroll above them."""

    def __init__(self, title: str, total_steps: int, console: Console) -> None:
        self._title, self._eta = title, Eta(total_steps)
        self._first: dict[str, str] = {}
        self._started = time.monotonic()
        self._live = Live(Text(f"{title}: starting"), console=console, refresh_per_second=4)
        self._live.start()

    def step(self, row: Row) -> None:
        """Redraw with the step's values and the first step's."""
        eta = clock(self._eta.after(row))
        table = Table.grid(padding=(0, 2))
        for label, text in shown(row.values):
            first = self._first.setdefault(label, text)
            table.add_row(Text(label, style="dim"), Text(text, style="bold"), Text(f"first {first}", style="dim"))
        elapsed = clock(time.monotonic() - self._started)
        self._draw(f"step {row.step + 1}", row.step + 1, self._eta.total_steps, f"{elapsed} elapsed, ETA {eta}", table)

    def progress(self, phase: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Redraw with the progress of the phase."""
        self._draw(phase, done, total, "  ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def say(self, text: str) -> None:
        """Print a line above the display."""
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop redrawing and release the terminal."""
        self._live.stop()

    def _draw(self, what: str, done: int, total: int, note: str, *below: Table) -> None:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._title, style="bold cyan"), f"{what} of {total}", ProgressBar(total=total, completed=done, width=40), note
        )
        self._live.update(Group(head, *below))
