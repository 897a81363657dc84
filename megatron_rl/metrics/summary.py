"""A finished run in a few numbers: from metrics.jsonl to a table and summary.json. Which metrics, and how: the catalogue says."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.metrics.catalogue import CATALOGUE, Statistic, SummaryRow
from megatron_rl.metrics.rows import Row, read_rows, series

EDGE = 10
"""Steps at either end of a run whose rewards are compared."""

_OF_ALL_ROWS = {
    "wall_time_s": "from the first worker to the last step",
    "num_tokens": "trained, prompts included",
    "tokens_per_s": "trained, over the whole time",
}
"""Rows of the summary that are made from no metric alone, with their meaning."""


def summarise_run(rows: Sequence[Row], supervised: Sequence[Row] = ()) -> dict[str, float]:
    """The summary of the training rows; a key whose values were never measured is left out.

    abs_dlogp_mean and ratio_mean are those of the probes, at equal weights; train_... are of the training batches, whose weights
    are some versions apart. sync_bytes are those that one update sends to each server. wall_time_s adds up the processes of a resumed run, without the time between them.
    """
    summary: dict[str, float] = {"steps": len(rows)}
    for name, row_of in _rows("ends"):
        if values := series(rows, name):
            summary[f"{row_of.key}_first{EDGE}"] = _mean(values[:EDGE])
            summary[f"{row_of.key}_last{EDGE}"] = _mean(values[-EDGE:])
    for name, row_of in _rows("mean"):
        pairs = [(row.values[name], _weight(row, row_of.weight)) for row in rows if name in row.values]
        total = sum(w for _, w in pairs)
        if total:
            summary[row_of.key] = sum(value * w for value, w in pairs) / total
    for name, row_of in _rows("max"):
        if values := series(rows, name):
            summary[row_of.key] = max(values)
    wall_time = sum(row.seconds for row in [*supervised, *rows])
    summary["wall_time_s"] = wall_time
    summary["num_tokens"] = sum(series(rows, "num_tokens"))
    training_time = sum(row.seconds for row in rows)
    if training_time:
        summary["tokens_per_s"] = summary["num_tokens"] / training_time
    return summary


def write_summary(metrics_file: Path, summary_file: Path) -> dict[str, float]:
    """summary.json from metrics.jsonl; a value that is no finite number is written as null. Returns the summary."""
    summary = summarise_run(read_rows(metrics_file), read_rows(metrics_file, "supervised"))
    readable = {key: value if math.isfinite(value) else None for key, value in summary.items()}
    summary_file.write_text(json.dumps(readable, indent=2) + "\n")
    return summary


def print_summary(summary: dict[str, float], console: Console | None = None) -> None:
    """The table at a run's end."""
    meanings = _meanings()
    table = Table(title="Summary", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for key, value in summary.items():
        table.add_row(key, f"{value:.6g}", meanings.get(key, ""))
    (console or Console()).print(table)


def _rows(statistic: Statistic) -> list[tuple[str, SummaryRow]]:
    """Name in the rows, and what the summary says of it."""
    return [
        (spec.plain_name, spec.summary) for spec in CATALOGUE if spec.summary is not None and spec.summary.statistic == statistic
    ]


def _meanings() -> dict[str, str]:
    """By the summary's keys."""
    ends = {
        f"{row.key}_{end}{EDGE}": f"{row.meaning}: mean of the {end} {EDGE} steps"
        for _, row in _rows("ends")
        for end in ("first", "last")
    }
    return ends | {row.key: row.meaning for statistic in ("mean", "max") for _, row in _rows(statistic)} | _OF_ALL_ROWS


def _weight(row: Row, name: str) -> float:
    return row.seconds if name == "seconds" else row.values.get(name, 1.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
