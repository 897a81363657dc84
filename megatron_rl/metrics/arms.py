"""Compares the arms of an experiment: each run's values at its start and end, with their spread over an arm's runs (seeds)."""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table

from megatron_rl.metrics.rows import Row, series

ENDS = ("first quarter", "last quarter")

_BOTH_ENDS = {
    "reward": "reward_mean",
    "entropy, full vocabulary": "entropy_full",
    "entropy, keep-sets": "entropy_keep_set",
    "mean abs Δ log p": "abs_dlogp_mean",
    "KL k1": "mismatch_kl_k1",
    "KL k3": "mismatch_kl_k3",
}
"""Label in the table to the metric's name; shown as the mean of a run's first and of its last quarter.

Labels hold no bar, which would end a cell of the Markdown table.
"""

_LARGEST = {"largest abs Δ log p": "abs_dlogp_max"}
"""Shown as the largest of a run's first and of its last quarter."""

_ALL_STEPS = {
    "mean abs Δ log p at equal weights (probes)": "probe/abs_dlogp_mean",
    "singleton share": "singleton_share",
    "staleness, versions": "staleness_mean",
    "bytes of a weight update": "sync_bytes",
}
"""Shown as the mean over all steps that have the metric."""


def measure_run(rows: Sequence[Row]) -> dict[str, float]:
    """The table's values of one run, by label; one that was never measured or is not finite is left out."""
    measured: dict[str, float] = {}
    for names, reduce in ((_BOTH_ENDS, _mean), (_LARGEST, _largest)):
        for label, name in names.items():
            if values := series(rows, name):
                quarter = max(1, len(values) // 4)
                measured |= {
                    f"{label}, {end}": reduce(part) for end, part in zip(ENDS, (values[:quarter], values[-quarter:]), strict=True)
                }
    for label, name in _ALL_STEPS.items():
        if values := series(rows, name):
            measured[label] = _mean(values)
    if values := series(rows, "staleness_max"):
        measured["staleness, largest"] = max(values)
    return {label: value for label, value in measured.items() if math.isfinite(value)}


def arms_table(arms: Mapping[str, Sequence[Sequence[Row]]]) -> Table:
    """A Markdown table with a column for each arm: mean ± standard deviation over its runs.

    Args:
        arms: Name of an arm to the rows of each of its runs.
    """
    measured = {arm: [measure_run(rows) for rows in runs] for arm, runs in arms.items()}
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right")
    table.add_row("runs", *(str(len(runs)) for runs in measured.values()))
    for label in _in_order(run for runs in measured.values() for run in runs):
        table.add_row(label, *(_cell([run[label] for run in runs if label in run], len(runs)) for runs in measured.values()))
    return table


def _cell(values: Sequence[float], num_runs: int) -> str:
    """Shows how many runs have the value where not all do: a run that diverged must not drop out of the mean silently."""
    if not values:
        return "-"
    mean = _mean(values)
    spread = f" ± {_standard_deviation(values, mean):.2g}" if len(values) > 1 else ""
    return f"{mean:.3g}{spread}" + (f" ({len(values)} of {num_runs})" if len(values) < num_runs else "")


def _standard_deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _in_order(runs: Iterable[Mapping[str, float]]) -> list[str]:
    """All labels that some run has, in the order of the table."""
    found = {label for run in runs for label in run}
    ends = [f"{label}, {end}" for label in (*_BOTH_ENDS, *_LARGEST) for end in ENDS]
    return [label for label in (*ends, *_ALL_STEPS, "staleness, largest") if label in found]


def _largest(values: Sequence[float]) -> float:
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
