"""`megatron-rl convert`: the conversions with a progress bar."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.config.sections import Precision
from megatron_rl.conversion import QuantisedAs, hf_to_megatron, megatron_to_hf
from megatron_rl.conversion.convert import Report
from megatron_rl.errors import accessing
from megatron_rl.precision import stored_format


def convert_hf_to_megatron(source: Path, out: Path, resume: bool) -> None:
    """Convert with a progress bar; see conversion.hf_to_megatron.

    Raises:
        CheckpointError: As there.
        FileAccessError: A file cannot be read or written.
    """
    with accessing(out), _progress_bar(f"{source} -> {out}") as report:
        hf_to_megatron(source, out, resume=resume, report=report)


def convert_megatron_to_hf(source: Path, out: Path, resume: bool, quantise: QuantisedAs | None) -> None:
    """Convert with a progress bar; see conversion.megatron_to_hf.

    Raises:
        CheckpointError: As there.
        QuantisationError: As there.
        FileAccessError: A file cannot be read or written.
    """
    with accessing(out), _progress_bar(f"{source} -> {out}") as report:
        megatron_to_hf(source, out, quantise=quantise, resume=resume, report=report)


def quantised_as(source: Path, layout: str, modules: list[str] | None, exclude: list[str] | None) -> QuantisedAs:
    """NVFP4 as in the configuration of the checkpoint's run; by the defaults of [precision] where the checkpoint has no run.

    Args:
        source: The checkpoint, RUN/checkpoints/step_NNNNNN.
        layout: modelopt or compressed-tensors.
        modules: Instead of the configuration's; None: the configuration's.
        exclude: Modules to leave unquantised; None: the configuration's.

    Raises:
        ConfigError: A value is not allowed.
    """
    run = RunFolder(source.resolve().parent.parent)
    section = run.config().precision if run.config_file.is_file() else Precision()
    given = {key: value for key, value in (("modules", modules), ("exclude", exclude)) if value is not None}
    try:
        chosen = Precision.model_validate({**section.model_dump(), **given})
    except ValidationError as error:
        raise ConfigError(
            "; ".join(f"--quantize-{f['loc'][0]}: {f['msg']}, found {f['input']!r}" for f in error.errors())
        ) from error
    return QuantisedAs(stored_format(chosen, layout), tuple(chosen.modules), tuple(chosen.exclude))


@contextmanager
def _progress_bar(title: str) -> Iterator[Report]:
    """Bytes and rate; where the output is no terminal, rich prints only the last state."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
