"""Writes a run's metrics to all the sinks that the config enables."""

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console

from megatron_rl.config.folder import RunFolder
from megatron_rl.config.tree import Config
from megatron_rl.errors import UserError
from megatron_rl.metrics.background import BackgroundSink
from megatron_rl.metrics.console import open_display
from megatron_rl.metrics.examples import ExamplesWriter
from megatron_rl.metrics.rows import JsonLines, Phase, Row
from megatron_rl.metrics.tensorboard import TensorBoardFile


class SinkError(UserError, ValueError):
    """A sink that the config enables cannot be opened."""


def check_sinks(config: Config) -> None:
    """Check that the enabled sinks can be opened.

    Raises:
        SinkError: W&B is enabled and not installed.
    """
    if not config.metrics.wandb_project:
        return
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise SinkError(
            f"metrics.wandb_project = '{config.metrics.wandb_project}' needs the package wandb: pip install wandb, or remove "
            "metrics.wandb_project"
        ) from error


class TensorBoard:
    """Values under their names, supervised ones under supervised/...; NaN is left out."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = TensorBoardFile(folder.tensorboard)

    def write(self, row: Row) -> None:
        """Write one row."""
        prefix = "" if row.phase == "train" else f"{row.phase}/"
        self._file.scalars(row.step, {prefix + name: v for name, v in row.values.items() if not math.isnan(v)}, row.time)

    def close(self) -> None:
        """Close the events file."""
        self._file.close()


class WeightsAndBiases:
    """A W&B run. Its id is in the run's folder, so that a resumed run continues it."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        import wandb

        id_file = folder.path / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.metrics.wandb_project,
            name=config.run.name,
            id=id_file.read_text(),
            resume="allow",
            dir=folder.path,
            config=config.model_dump(mode="json"),
        )

    def write(self, row: Row) -> None:
        """Log one row."""
        prefix = "" if row.phase == "train" else f"{row.phase}/"
        self._run.log({f"{prefix}step": row.step} | {prefix + name: value for name, value in row.values.items()})

    def close(self) -> None:
        """Upload the rest, and end this process's part of the run."""
        self._run.finish()


def _opened_wandb(config: Config, folder: RunFolder) -> WeightsAndBiases:
    try:
        return WeightsAndBiases(config, folder)
    except Exception as error:  # whatever W&B raises without a login or a network
        raise SinkError(
            f"metrics.wandb_project = '{config.metrics.wandb_project}': W&B cannot be opened ({type(error).__name__}: {error}); "
            "run `wandb login`, set WANDB_MODE=offline, or remove metrics.wandb_project"
        ) from error


class Sinks:
    """All sinks and the display. Close it however the run ends: the live display owns the terminal.

    metrics.jsonl is a file that the run itself needs, and a fault of it ends the run. All others are written in the background:
    no fault of them reaches a step.

    Args:
        config: Enables the sinks.
        folder: Of the run.
        console: Of the display; by default stdout.
        on_fault: Called with a line for each kind of fault of a sink, by the thread that writes the next step; None: it is shown.

    Raises:
        SinkError: A sink cannot be opened.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        console: Console | None = None,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        check_sinks(config)
        self._metrics = JsonLines(folder.metrics_file)
        self._on_fault = on_fault or self.say
        self._sinks: list[BackgroundSink] = []
        if config.metrics.tensorboard:
            tensorboard = TensorBoard(folder)
            self._sinks.append(BackgroundSink("TensorBoard", tensorboard.write, tensorboard.close))
        if config.metrics.wandb_project:
            wandb = _opened_wandb(config, folder)
            self._sinks.append(BackgroundSink("W&B", wandb.write, wandb.close))
        writer = ExamplesWriter(folder.examples, config.metrics.examples_per_step)
        self._examples = BackgroundSink(f"{folder.examples.name}/", writer.write)
        self._display = open_display(config.run.name, config.run.steps, console)
        self._last = time.monotonic()
        self._is_closed = False

    def write(self, step: int, values: Mapping[str, float], phase: Phase = "train") -> None:
        """Write all that was measured of one step."""
        now = time.monotonic()
        row = Row(step, values, phase, seconds=now - self._last)
        self._last = now
        self._metrics.write(row)
        for sink in self._sinks:
            sink.put(row)
        self._report_faults()
        if phase == "train":
            self._display.step(row)

    def examples(self, step: int, examples: Sequence[Mapping]) -> None:
        """Write metrics.examples_per_step of these rollouts (prompt, completion, reward) as readable text."""
        self._examples.put(step, examples)

    def progress(self, phase: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Show the progress of a phase without training steps; nothing is recorded."""
        self._display.progress(phase, done, total, values)

    def say(self, text: str) -> None:
        """Print a line without disturbing the live display."""
        self._display.say(text)

    @property
    def lost(self) -> dict[str, int]:
        """Sink to number of writes that were lost, of those that lost some. Complete after `close`."""
        return {sink.name: sink.lost for sink in (*self._sinks, self._examples) if sink.lost}

    def close(self) -> None:
        """Close the display, then the sinks; each has some seconds for what waits. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._display.close()
        self._metrics.close()
        for sink in (*self._sinks, self._examples):
            sink.close()
        self._report_faults()

    def _report_faults(self) -> None:
        for sink in (*self._sinks, self._examples):
            for fault in sink.take_faults():
                self._on_fault(fault)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
