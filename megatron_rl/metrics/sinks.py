"""Writes a run's metrics to all the sinks that the config enables."""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from rich.console import Console

from megatron_rl.config.folder import RunFolder
from megatron_rl.config.tree import Config
from megatron_rl.errors import UserError
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


class Sink(Protocol):
    """Where rows are written."""

    def write(self, row: Row) -> None:
        """Write one row."""

    def close(self) -> None:
        """Write what is buffered, and release files and connections."""


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


class Sinks:
    """All sinks and the display. Close it however the run ends: the live display owns the terminal.

    Args:
        config: Enables the sinks.
        folder: Of the run.
        console: Of the display; by default stdout.

    Raises:
        SinkError: A sink cannot be opened.
    """

    def __init__(self, config: Config, folder: RunFolder, console: Console | None = None) -> None:
        check_sinks(config)
        self._sinks: list[Sink] = [JsonLines(folder.metrics_file)]
        if config.metrics.tensorboard:
            self._sinks.append(TensorBoard(folder))
        if config.metrics.wandb_project:
            self._sinks.append(WeightsAndBiases(config, folder))
        self._examples = ExamplesWriter(folder.examples, config.metrics.examples_per_step)
        self._display = open_display(config.run.name, config.run.steps, console)
        self._last = time.monotonic()

    def write(self, step: int, values: Mapping[str, float], phase: Phase = "train") -> None:
        """Write all that was measured of one step."""
        now = time.monotonic()
        row = Row(step, values, phase, seconds=now - self._last)
        self._last = now
        for sink in self._sinks:
            sink.write(row)
        if phase == "train":
            self._display.step(row)

    def examples(self, step: int, examples: Sequence[Mapping]) -> None:
        """Write metrics.examples_per_step of these rollouts (prompt, completion, reward) as readable text."""
        self._examples.write(step, examples)

    def progress(self, phase: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Show the progress of a phase without training steps; nothing is recorded."""
        self._display.progress(phase, done, total, values)

    def say(self, text: str) -> None:
        """Print a line without disturbing the live display."""
        self._display.say(text)

    def close(self) -> None:
        """Close the display, then the sinks."""
        self._display.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
