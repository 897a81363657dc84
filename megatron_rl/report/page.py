"""The HTML page, which contains everything that a browser needs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from plotly.offline import get_plotlyjs

from megatron_rl.config import RunFolder
from megatron_rl.errors import UserError, accessing, check_output_file
from megatron_rl.metrics import Row, damaged_lines, read_rows, summarise_run
from megatron_rl.metrics.catalogue import PANELS
from megatron_rl.report.figures import colours, figure, trainer_waits
from megatron_rl.report.lengths import lengths_figure, read_lengths
from megatron_rl.report.rollouts import shown_rollouts

STEPS_WITH_ROLLOUTS = 12


class ReportError(UserError, ValueError):
    """No report can be made of a folder, or written to a file."""


@dataclass(frozen=True)
class Written:
    """A report that was written."""

    num_bytes: int
    remarks: tuple[str, ...]
    """What could not be shown, one line each."""


def write_report(folders: Sequence[RunFolder], out: Path) -> Written:
    """Write one HTML file of these runs, side by side.

    Raises:
        ReportError: There is nothing to show, or `out` is no HTML file; nothing is written.
        FileAccessError: `out` cannot be written.
    """
    _check_out(out)
    remarks: list[str] = []
    names = _names(folders)
    rows = {name: _rows(folder, remarks.append) for name, folder in zip(names, folders, strict=True)}
    lengths = lengths_figure({name: read_lengths(folder, remarks.append) for name, folder in zip(names, folders, strict=True)})
    figures = [drawn for drawn in (*(figure(panel, rows) for panel in PANELS), lengths) if drawn is not None]
    page = _template().render(
        names=names,
        colours=colours(names),
        plotly=get_plotlyjs(),
        figures=[_for_script(drawn.to_json()) for drawn in figures],
        summaries=_summaries(
            {
                name: summarise_run(rows[name], read_rows(folder.metrics_file, "supervised"))
                for name, folder in zip(names, folders, strict=True)
            }
        ),
        configs={name: folder.config_file.read_text(errors="replace") for name, folder in zip(names, folders, strict=True)},
        rollouts=_for_script(
            json.dumps({name: _rollouts(folder, rows[name], remarks.append) for name, folder in zip(names, folders, strict=True)})
        ),
    )
    with accessing(out, "choose another file for --out"):
        out.write_text(page, encoding="utf-8")
    return Written(len(page.encode()), tuple(remarks))


def _check_out(out: Path) -> None:
    if out.suffix != ".html":
        raise ReportError(f"--out {out}: the report is HTML and replaces an existing file; give a name that ends in .html")
    check_output_file("--out", out)


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The names of the folders if they differ, else their full paths."""
    short = [folder.path.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder.path.resolve()) for folder in folders]


def _rows(folder: RunFolder, remark: Callable[[str], None]) -> list[Row]:
    if not folder.config_file.is_file() or not folder.metrics_file.exists():
        raise ReportError(
            f"{folder.path}: there is no run in this folder (it needs config.toml and metrics.jsonl); give the folder of a run, "
            "for example runs/NAME"
        )
    rows = read_rows(folder.metrics_file)
    if damaged := damaged_lines(folder.metrics_file):
        remark(f"{folder.metrics_file}: {len(damaged)} lines are damaged and left out; the first is line {damaged[0]}")
    if not rows and damaged:
        raise ReportError(f"{folder.metrics_file}: no line is a complete row of a training step; there is nothing to draw")
    if not rows:
        raise ReportError(f"{folder.path}: the run has not finished a training step yet; there is nothing to draw")
    return [replace(row, values={**row.values, **trainer_waits(row)}) for row in rows]


def _rollouts(folder: RunFolder, rows: Sequence[Row], remark: Callable[[str], None]) -> list[dict]:
    places = np.linspace(0, len(rows) - 1, min(STEPS_WITH_ROLLOUTS, len(rows))).round().astype(int)
    return [shown.as_json() for shown in shown_rollouts(folder, [rows[place].step for place in places], remark)]


def _summaries(of_runs: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """The value in each run as text, by key."""
    keys = dict.fromkeys(key for summary in of_runs.values() for key in summary)
    return {key: [f"{summary[key]:.6g}" if key in summary else "" for summary in of_runs.values()] for key in keys}


def _for_script(data: str) -> str:
    """JSON that cannot close its script element, whatever text the rollouts contain."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files("megatron_rl.report").joinpath("page.html.jinja").read_text(encoding="utf-8"))
