"""The plots: series that belong together, with those of several runs in the same plot."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative

from megatron_rl.metrics import Row
from megatron_rl.metrics.catalogue import Panel, curves_of

DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


def trainer_waits(row: Row) -> dict[str, float]:
    """Seconds of a step in which the trainer neither trained nor updated weights: it waited for rollouts or a checkpoint.

    Args:
        row: The metrics of one step.

    Returns:
        trainer_waits_s; empty if the row has no step_s.
    """
    if "step_s" not in row.values:
        return {}
    return {"trainer_waits_s": max(0.0, row.seconds - row.values["step_s"] - row.values.get("sync_s", 0.0))}


def colours(runs: Iterable[str]) -> dict[str, str]:
    """One colour per run, the same in all plots."""
    names = list(runs)
    palette = qualitative.Plotly if len(names) <= len(qualitative.Plotly) else qualitative.Dark24
    return {name: palette[number % len(palette)] for number, name in enumerate(names)}


def figure(panel: Panel, runs: Mapping[str, Sequence[Row]]) -> go.Figure | None:
    """Draws a panel over the steps.

    Values that are not finite leave a gap. The plot's legend distinguishes the series; the page's legend distinguishes the runs,
    for all plots together, by the `meta` of each trace.

    Args:
        panel: The series of the plot.
        runs: Rows of metrics by name of the run.

    Returns:
        The plot; None if no run has any of the series.
    """
    drawn, colour_of = go.Figure(), colours(runs)
    in_legend: set[str] = set()
    for run, rows in runs.items():
        for dash, (name, words) in zip(DASHES, curves_of(panel).items(), strict=False):
            measured = [row for row in rows if name in row.values]
            if measured:
                drawn.add_scatter(
                    x=np.array([row.step for row in measured], dtype=np.int32),
                    y=np.array([row.values[name] for row in measured], dtype=np.float32),
                    name=words,
                    meta=run,
                    legendgroup=words,
                    showlegend=words not in in_legend,
                    mode="lines",
                    line={"color": colour_of[run], "dash": dash, "width": 1.5},
                    hovertemplate=(f"{_as_text(run)}: " if len(runs) > 1 else "")
                    + f"{_as_text(words)}, step %{{x}}: %{{y:.5g}}<extra></extra>",
                )
                in_legend.add(words)
    if not drawn.data:
        return None
    drawn.update_layout(
        title=panel.title,
        template="plotly_white",
        height=380,
        margin={"l": 60, "r": 20, "t": 50, "b": 90},
        showlegend=True,
        legend={"orientation": "h", "y": -0.2},
        xaxis_title="step",
        yaxis_title=panel.unit,
        yaxis_type="log" if panel.logarithmic else "linear",
    )
    return drawn


def _as_text(words: str) -> str:
    """Escaped for a template of hover texts, which interprets tags and %{...}."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")
