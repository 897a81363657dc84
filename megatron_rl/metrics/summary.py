"""A finished run in a few numbers: from metrics.jsonl to a table and summary.json.

Read from each training row, where they are there:
    plan's summary (batching.step.summarise)   reward_mean, keep_set_coverage, routing_coverage, singleton_share, staleness_mean,
                                               staleness_max, num_tokens, num_loss_tokens, num_rollouts
    objective's metrics                        mismatch_kl_k1, abs_dlogp_mean, ratio_mean, entropy_keep_set
    the same of probe rollouts                 probe/abs_dlogp_mean, probe/abs_dlogp_max, probe/ratio_mean,
                                               probe/num_loss_tokens
    trainer and rollouts                       overhead_share, step_s, trainer_tokens_per_s, rollout_tokens_per_s
    weight sync                                sync_bytes
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.metrics.rows import Row, read_rows, series

EDGE = 10
"""Steps at either end of a run whose rewards are compared."""

_WEIGHTED_MEANS = {
    "keep_set_coverage": ("keep_set_coverage", "num_loss_tokens"),
    "routing_coverage": ("routing_coverage", "num_tokens"),
    "singleton_share": ("singleton_share", "num_loss_tokens"),
    "staleness_mean": ("staleness_mean", "num_rollouts"),
    "abs_dlogp_mean": ("probe/abs_dlogp_mean", "probe/num_loss_tokens"),
    "ratio_mean": ("probe/ratio_mean", "probe/num_loss_tokens"),
    "train_mismatch_kl_k1": ("mismatch_kl_k1", "num_loss_tokens"),
    "train_abs_dlogp_mean": ("abs_dlogp_mean", "num_loss_tokens"),
    "train_ratio_mean": ("ratio_mean", "num_loss_tokens"),
    "overhead_share": ("overhead_share", "step_s"),
    "trainer_tokens_per_s": ("trainer_tokens_per_s", "step_s"),
    "rollout_tokens_per_s": ("rollout_tokens_per_s", "seconds"),
}
"""Key of the summary: the value in a row, and what it is weighted by (a row without the weight counts 1)."""

_LARGEST = {"staleness_max": "staleness_max", "abs_dlogp_max": "probe/abs_dlogp_max", "sync_bytes": "sync_bytes"}


def summarise_run(rows: Sequence[Row], supervised: Sequence[Row] = ()) -> dict[str, float]:
    """The summary of the training rows; a key whose values were never measured is left out.

    abs_dlogp_mean and ratio_mean are those of the probes, at equal weights; train_... are of the training batches, whose weights
    are some versions apart. sync_bytes are those that one update sends to each server. wall_time_s adds up the processes of a resumed run, without the time between them.
    """
    summary: dict[str, float] = {"steps": len(rows)}
    for name in ("reward", "entropy"):
        values = series(rows, {"reward": "reward_mean", "entropy": "entropy_keep_set"}[name])
        if values:
            summary[f"{name}_first{EDGE}"] = _mean(values[:EDGE])
            summary[f"{name}_last{EDGE}"] = _mean(values[-EDGE:])
    for key, (name, weight) in _WEIGHTED_MEANS.items():
        pairs = [(row.values[name], _weight(row, weight)) for row in rows if name in row.values]
        total = sum(w for _, w in pairs)
        if total:
            summary[key] = sum(value * w for value, w in pairs) / total
    for key, name in _LARGEST.items():
        if values := series(rows, name):
            summary[key] = max(values)
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


_MEANING = {
    "reward_first10": "mean of the first ten steps",
    "reward_last10": "mean of the last ten steps",
    "entropy_first10": "nats, over the keep-sets",
    "keep_set_coverage": "share of the trained tokens with a keep-set",
    "routing_coverage": "share of the tokens with routes",
    "singleton_share": "share of the trained tokens whose keep-set has one id",
    "staleness_mean": "weight updates between sampling and training",
    "abs_dlogp_mean": "probes, at equal weights: |log p trainer - log p server|",
    "ratio_mean": "probes, at equal weights",
    "train_mismatch_kl_k1": "training batches, whose weights are some updates old",
    "train_abs_dlogp_mean": "training batches",
    "train_ratio_mean": "training batches",
    "overhead_share": "of a step: neither Megatron, optimizer, waiting nor weight update",
    "trainer_tokens_per_s": "while the trainer works",
    "rollout_tokens_per_s": "sampled, over the whole time",
    "wall_time_s": "from the first worker to the last step",
    "num_tokens": "trained, prompts included",
    "tokens_per_s": "trained, over the whole time",
    "sync_bytes": "of one weight update to one server",
}


def print_summary(summary: dict[str, float], console: Console | None = None) -> None:
    """The table at a run's end."""
    table = Table(title="Summary", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for key, value in summary.items():
        table.add_row(key, f"{value:.6g}", _MEANING.get(key, ""))
    (console or Console()).print(table)


def _weight(row: Row, name: str) -> float:
    return row.seconds if name == "seconds" else row.values.get(name, 1.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
