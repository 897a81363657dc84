"""Summarises a run: from metrics.jsonl to summary.json and a table. The catalogue declares which metrics, and how."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.metrics.catalogue import CATALOGUE, Statistic, SummaryRow
from megatron_rl.metrics.rows import Row, read_rows, series

EDGE = 10
"""Number of first and of last steps whose means are compared."""

_OF_ALL_ROWS = {
    "wall_time_s": "from the first worker to the last step",
    "num_tokens": "trained, prompts included",
    "tokens_per_s": "trained, over the whole time",
}
"""Rows of the summary that are not the statistic of one metric, with their meaning."""


def summarise_run(rows: Sequence[Row], supervised: Sequence[Row] = ()) -> dict[str, float]:
    """The summary of a run.

    abs_dlogp_mean and ratio_mean are those of the probes, at equal weights; train_... are of the training batches, whose weights
    are some versions apart. sync_bytes are those that one update sends to each server. wall_time_s adds up the processes of a
    resumed run, without the time between them.

    Args:
        rows: Of the training steps.
        supervised: Of the supervised start; they count in wall_time_s alone.

    Returns:
        Key to value, without the keys that were never measured.
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


def write_summary(metrics_file: Path, summary_file: Path, lost: Mapping[str, int] | None = None) -> dict[str, float]:
    """Write summary.json from metrics.jsonl, with null for a value that is not finite, and return the summary.

    Args:
        metrics_file: metrics.jsonl of the run.
        summary_file: Is written.
        lost: Sink to number of its writes that were lost; `lost_writes` in the file.
    """
    summary = summarise_run(read_rows(metrics_file), read_rows(metrics_file, "supervised"))
    readable: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in summary.items()}
    readable |= {"lost_writes": dict(lost)} if lost else {}
    summary_file.write_text(json.dumps(readable, indent=2) + "\n")
    return summary


def print_summary(summary: dict[str, float], console: Console | None = None) -> None:
    """Print the table at a run's end."""
    meanings = _meanings()
    table = Table(title="Summary", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for key, value in summary.items():
        table.add_row(key, f"{value:.6g}", meanings.get(key, ""))
    (console or Console()).print(table)


def _rows(statistic: Statistic) -> list[tuple[str, SummaryRow]]:
    """Metric's name and its row of the summary."""
    return [
        (spec.plain_name, spec.summary) for spec in CATALOGUE if spec.summary is not None and spec.summary.statistic == statistic
    ]


def _meanings() -> dict[str, str]:
    """Key of the summary to its meaning."""
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
