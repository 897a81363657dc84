"""Where a run's metrics go: all the sinks that the config asks for, behind one object."""

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
    """A sink that the config asks for and that cannot be opened."""


def check_sinks(config: Config) -> None:
    """Raise SinkError when W&B is asked for and not installed."""
    if not config.metrics.wandb_project:
        return
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise SinkError(
            f"metrics.wandb_project = '{config.metrics.wandb_project}' needs the package wandb: pip install wandb, or leave "
            "metrics.wandb_project out"
        ) from error


class Sink(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """The values of a row under their names, supervised ones under supervised/...; those that are no numbers are left out."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = TensorBoardFile(folder.tensorboard)

    def write(self, row: Row) -> None:
        prefix = "" if row.phase == "train" else f"{row.phase}/"
        self._file.scalars(row.step, {prefix + name: v for name, v in row.values.items() if not math.isnan(v)}, row.time)

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """A W&B run; a resumed run goes on in it, since its id lies in the run's folder."""

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
        prefix = "" if row.phase == "train" else f"{row.phase}/"
        self._run.log({f"{prefix}step": row.step} | {prefix + name: value for name, value in row.values.items()})

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """One row a step to every sink and to the display. Close it on every way out: the live display owns the terminal."""

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
        """All that was measured of one step."""
        now = time.monotonic()
        row = Row(step, values, phase, seconds=now - self._last)
        self._last = now
        for sink in self._sinks:
            sink.write(row)
        if phase == "train":
            self._display.step(row)

    def examples(self, step: int, examples: Sequence[Mapping]) -> None:
        """Keep metrics.examples_per_step of these readable rollouts (prompt, completion, reward)."""
        self._examples.write(step, examples)

    def progress(self, phase: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Show how far a phase has come that is not made of training steps; nothing is recorded."""
        self._display.progress(phase, done, total, values)

    def say(self, text: str) -> None:
        """A line for the user that does not tear the live display."""
        self._display.say(text)

    def close(self) -> None:
        self._display.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
