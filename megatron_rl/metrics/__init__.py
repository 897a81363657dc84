"""Named values with their reduction, and their sinks: console, JSONL, TensorBoard, W&B, the summary of a run."""

from megatron_rl.metrics.arms import arms_table, measure_run
from megatron_rl.metrics.console import wide_console
from megatron_rl.metrics.metric import Metric, Metrics, Reduction, merge, to_floats
from megatron_rl.metrics.rows import Phase, Row, damaged_lines, read_rows, series
from megatron_rl.metrics.sinks import SinkError, Sinks, check_sinks
from megatron_rl.metrics.spans import Spans
from megatron_rl.metrics.summary import print_summary, summarise_run, write_summary

__all__ = [
    "Metric",
    "Metrics",
    "Phase",
    "Reduction",
    "Row",
    "SinkError",
    "Sinks",
    "Spans",
    "arms_table",
    "check_sinks",
    "damaged_lines",
    "measure_run",
    "merge",
    "print_summary",
    "read_rows",
    "series",
    "summarise_run",
    "to_floats",
    "wide_console",
    "write_summary",
]
