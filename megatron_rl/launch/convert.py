"""`megatron-rl convert`: the conversions with a progress bar."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_rl.conversion import hf_to_megatron, megatron_to_hf
from megatron_rl.conversion.convert import Report


def convert_hf_to_megatron(source: Path, out: Path, resume: bool) -> None:
    with _progress_bar(f"{source} -> {out}") as report:
        hf_to_megatron(source, out, resume=resume, report=report)


def convert_megatron_to_hf(source: Path, out: Path, resume: bool) -> None:
    with _progress_bar(f"{source} -> {out}") as report:
        megatron_to_hf(source, out, resume=resume, report=report)


@contextmanager
def _progress_bar(title: str) -> Iterator[Report]:
    """Bytes and rate; where nobody looks, rich prints the last state alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
