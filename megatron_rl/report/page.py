"""The page: everything that a browser needs in one file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from megatron_rl.config import RunFolder
from megatron_rl.metrics import Row, read_rows, summarise_run
from megatron_rl.report.figures import PANELS, figure, trainer_waits
from megatron_rl.report.lengths import lengths_figure, read_lengths
from megatron_rl.report.rollouts import shown_rollouts

STEPS_WITH_ROLLOUTS = 12


class ReportError(ValueError):
    """A folder of which no report can be made."""


def write_report(folders: Sequence[RunFolder], out: Path) -> int:
    """One HTML file of these runs, side by side; returns its bytes. Raises ReportError before anything is written."""
    names = _names(folders)
    rows = {name: _rows(folder) for name, folder in zip(names, folders, strict=True)}
    lengths = lengths_figure({name: read_lengths(folder) for name, folder in zip(names, folders, strict=True)})
    figures = [drawn for drawn in (*(figure(panel, rows) for panel in PANELS), lengths) if drawn is not None]
    page = _template().render(
        names=names, plotly=get_plotlyjs(),
        figures=[_for_script(drawn.to_json()) for drawn in figures],
        summaries=_summaries({
            name: summarise_run(rows[name], read_rows(folder.metrics_file, "supervised")) for name, folder in zip(names, folders, strict=True)
        }),
        configs={name: folder.config_file.read_text() for name, folder in zip(names, folders, strict=True)},
        rollouts=_for_script(json.dumps({name: _rollouts(folder, rows[name]) for name, folder in zip(names, folders, strict=True)})),
    )  # fmt: skip
    out.write_text(page, encoding="utf-8")
    return len(page.encode())


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The folders' last parts where these differ, else their whole paths."""
    short = [folder.path.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder.path.resolve()) for folder in folders]


def _rows(folder: RunFolder) -> list[Row]:
    if not folder.config_file.exists() or not folder.metrics_file.exists():
        raise ReportError(f"{folder.path}: no run lies here (config.toml and metrics.jsonl are wanted); give the folder of a run, for example runs/NAME")
    rows = read_rows(folder.metrics_file)
    if not rows:
        raise ReportError(f"{folder.path}: the run has not finished a training step yet; there is nothing to draw")
    return [replace(row, values={**row.values, **trainer_waits(row)}) for row in rows]


def _rollouts(folder: RunFolder, rows: Sequence[Row]) -> list[dict]:
    places = np.linspace(0, len(rows) - 1, min(STEPS_WITH_ROLLOUTS, len(rows))).round().astype(int)
    return [shown.as_json() for shown in shown_rollouts(folder, [rows[place].step for place in places])]


def _summaries(of_runs: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """Key to its value in each run, as text."""
    keys = dict.fromkeys(key for summary in of_runs.values() for key in summary)
    return {key: [f"{summary[key]:.6g}" if key in summary else "" for summary in of_runs.values()] for key in keys}


def _for_script(data: str) -> str:
    """JSON that cannot end the script element which it stands in, whatever the rollouts say."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _template():
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files("megatron_rl.report").joinpath("page.html.jinja").read_text(encoding="utf-8"))
