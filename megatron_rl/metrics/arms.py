"""The arms of an experiment side by side: what each run began and ended with, and its spread over the runs of an arm (its seeds)."""

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
"""Words of the table (without the bar, which would end a cell) to the name in a row; shown as the mean of a run's first and of its last quarter."""

_LARGEST = {"largest abs Δ log p": "abs_dlogp_max"}
"""Shown as the largest of a run's first and of its last quarter."""

_WHOLE_RUN = {
    "mean abs Δ log p at equal weights (probes)": "probe/abs_dlogp_mean",
    "singleton share": "singleton_share",
    "staleness, versions": "staleness_mean",
    "bytes of a weight update": "sync_bytes",
}
"""Shown as the mean over all steps that have it."""


def measure_run(rows: Sequence[Row]) -> dict[str, float]:
    """The table's values of one run, by their words; one that was never measured, or was no finite number at that end, is left out."""
    measured = {}
    for names, reduce in ((_BOTH_ENDS, _mean), (_LARGEST, _largest)):
        for words, name in names.items():
            if values := series(rows, name):
                quarter = max(1, len(values) // 4)
                measured |= {
                    f"{words}, {end}": reduce(part) for end, part in zip(ENDS, (values[:quarter], values[-quarter:]), strict=True)
                }
    for words, name in _WHOLE_RUN.items():
        if values := series(rows, name):
            measured[words] = _mean(values)
    if values := series(rows, "staleness_max"):
        measured["staleness, largest"] = max(values)
    return {words: value for words, value in measured.items() if math.isfinite(value)}


def arms_table(arms: Mapping[str, Sequence[Sequence[Row]]]) -> Table:
    """A column for each arm; its runs' rows as mean ± standard deviation over the runs, and of how many. Printed as Markdown."""
    measured = {arm: [measure_run(rows) for rows in runs] for arm, runs in arms.items()}
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right")
    table.add_row("runs", *(str(len(runs)) for runs in measured.values()))
    for words in _in_order(run for runs in measured.values() for run in runs):
        table.add_row(words, *(_cell([run[words] for run in runs if words in run], len(runs)) for runs in measured.values()))
    return table


def _cell(values: Sequence[float], num_runs: int) -> str:
    """A value that not all runs have says how many had it: a run whose numbers ran away must not drop out of the mean in silence."""
    if not values:
        return "-"
    mean = _mean(values)
    spread = f" ± {_standard_deviation(values, mean):.2g}" if len(values) > 1 else ""
    return f"{mean:.3g}{spread}" + (f" ({len(values)} of {num_runs})" if len(values) < num_runs else "")


def _standard_deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _in_order(runs: Iterable[Mapping[str, float]]) -> list[str]:
    """All words that some run has, in the order of the table."""
    found = {words for run in runs for words in run}
    ends = [f"{words}, {end}" for words in (*_BOTH_ENDS, *_LARGEST) for end in ENDS]
    return [words for words in (*ends, *_WHOLE_RUN, "staleness, largest") if words in found]


def _largest(values: Sequence[float]) -> float:
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
