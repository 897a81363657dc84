"""The plots: what is drawn together, and the same of several runs on top of one another."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative

from megatron_rl.metrics import Row

DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True)
class Panel:
    """One plot. series: name in the rows to the words of the legend; drawn apart by their dashes, runs by their colours."""

    title: str
    series: Mapping[str, str]
    unit: str = ""
    logarithmic: bool = False


PANELS = (
    Panel("Reward", {"reward_mean": "mean", "reward_std": "standard deviation"}),
    Panel("Entropy", {"entropy_keep_set": "of the keep-sets", "entropy_full": "of the whole vocabulary"}, "nats"),
    Panel("Mismatch of trainer and rollouts (KL)", {"mismatch_kl_k1": "k1", "mismatch_kl_k3": "k3"}, "nats"),
    Panel("|Δ log p|", {"abs_dlogp_mean": "mean", "abs_dlogp_max": "largest"}, logarithmic=True),
    Panel(
        "|Δ log p| at equal weights (probes)",
        {"probe/abs_dlogp_mean": "mean", "probe/abs_dlogp_max": "largest"},
        logarithmic=True,
    ),
    Panel(
        "Ratio p_trainer / p_rollout",
        {"ratio_mean": "mean", "ratio_p01": "1 % quantile", "ratio_p50": "median", "ratio_p99": "99 % quantile"},
    ),
    Panel("Singletons", {"singleton_share": "share of the trained tokens"}),
    Panel(
        "Keep-set size",
        {
            "keep_set_size_mean": "mean",
            "keep_set_size_p50": "median",
            "keep_set_size_p99": "99 % quantile",
            "keep_set_size_max": "largest",
        },
        "ids",
        logarithmic=True,
    ),
    Panel("Staleness", {"staleness_mean": "mean", "staleness_max": "largest"}, "versions"),
    Panel("Gradient norm", {"grad_norm": "before clipping"}, logarithmic=True),
    Panel(
        "Clipped and masked",
        {"clip_fraction": "clipped", "masked_fraction": "masked", "ratio_off_share": "ratio far from 1"},
        "share of the tokens",
    ),
    Panel("Tokens a second", {"trainer_tokens_per_s": "trainer, while it trains", "rollout_tokens_per_s": "rollouts"}),
    Panel("Waiting", {"trainer_waits_s": "trainer, for rollouts", "sync_pause_s": "servers, paused for an update"}, "s a step"),
    Panel("Weight sync", {"sync_s": "in all", "sync_transfer_s": "transfer"}, "s"),
    Panel("Bytes of an update", {"sync_bytes": "to each server"}, "bytes"),
    Panel("Step", {"step_s": "trainer's step", "forward_backward_s": "forward and backward", "optimizer_s": "optimizer"}, "s"),
    Panel(
        "Ledger",
        {"ledger/drawn": "drawn", "ledger/trained": "trained", "ledger/in_flight": "in flight", "ledger/dropped": "dropped"},
        "prompts",
    ),
    Panel(
        "Length of completions",
        {
            "completion_tokens_mean": "trained, mean",
            "completion_tokens_max": "trained, longest",
            "ledger/discarded_length_mean": "discarded, mean",
        },
        "tokens",
    ),
)


def trainer_waits(row: Row) -> dict[str, float]:
    """Seconds between two steps that the trainer neither trained nor synchronised: it waited for rollouts (or for a checkpoint)."""
    if "step_s" not in row.values:
        return {}
    return {"trainer_waits_s": max(0.0, row.seconds - row.values["step_s"] - row.values.get("sync_s", 0.0))}


def colours(runs: Iterable[str]) -> dict[str, str]:
    """Of each run, the same in all plots."""
    names = list(runs)
    palette = qualitative.Plotly if len(names) <= len(qualitative.Plotly) else qualitative.Dark24
    return {name: palette[number % len(palette)] for number, name in enumerate(names)}


def figure(panel: Panel, runs: Mapping[str, Sequence[Row]]) -> go.Figure | None:
    """The panel over steps; None when no run has any of its series. Values that are no finite numbers leave a gap.

    Its legend tells the series apart; a trace's `meta` is its run, which the page's own legend tells apart, for all plots together.
    """
    drawn, colour_of = go.Figure(), colours(runs)
    in_legend: set[str] = set()
    for run, rows in runs.items():
        for dash, (name, words) in zip(DASHES, panel.series.items()):
            measured = [row for row in rows if name in row.values]
            if measured:
                drawn.add_scatter(
                    x=np.array([row.step for row in measured], dtype=np.int32), y=np.array([row.values[name] for row in measured], dtype=np.float32),
                    name=words, meta=run, legendgroup=words, showlegend=words not in in_legend, mode="lines",
                    line={"color": colour_of[run], "dash": dash, "width": 1.5},
                    hovertemplate=(f"{_as_text(run)}: " if len(runs) > 1 else "") + f"{_as_text(words)}, step %{{x}}: %{{y:.5g}}<extra></extra>",
                )  # fmt: skip
                in_legend.add(words)
    if not drawn.data:
        return None
    drawn.update_layout(
        title=panel.title, template="plotly_white", height=380, margin={"l": 60, "r": 20, "t": 50, "b": 90}, showlegend=True,
        legend={"orientation": "h", "y": -0.2}, xaxis_title="step", yaxis_title=panel.unit, yaxis_type="log" if panel.logarithmic else "linear",
    )  # fmt: skip
    return drawn


def _as_text(words: str) -> str:
    """In a template of hover texts, which knows tags and %{...}."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")
