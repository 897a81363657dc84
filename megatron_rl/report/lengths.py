"""Lengths of the completions that were trained on and of those that were discarded, from the ledger of the latest checkpoint."""

import json
from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from megatron_rl.config import RunFolder
from megatron_rl.report.figures import colours

Lengths = Mapping[str, Sequence[int]]
"""Counts of 'trained' and of 'discarded' completions: bin k has those of 2^k to 2^(k+1) - 1 tokens."""


def read_lengths(folder: RunFolder, remark: Callable[[str], None]) -> Lengths | None:
    """Reads the lengths from the latest checkpoint.

    Args:
        folder: The run's folder.
        remark: Called with one line if the checkpoint is damaged.

    Returns:
        The counts; None if there is no readable checkpoint.
    """
    latest = folder.latest_checkpoint()
    if latest is None:
        return None
    file = latest[1] / "orchestrator.json"
    try:
        ledger = json.loads(file.read_text())["ledger"]
        return {"trained": ledger["kept_lengths"]["counts"], "discarded": ledger["discarded_lengths"]["counts"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        remark(f"{file} cannot be read ({error}): the plot leaves out the lengths of this run")
        return None


def lengths_figure(of_runs: Mapping[str, Lengths | None]) -> go.Figure | None:
    """Draws the fraction of completions by length, so that trained and discarded ones can be compared.

    Args:
        of_runs: Counts by name of the run.

    Returns:
        The plot; None if no run has completions.
    """
    drawn = go.Figure()
    colour_of = colours(of_runs)
    for run, lengths in of_runs.items():
        for kind, counts in (lengths or {}).items():
            if total := sum(counts):
                name = f"{kind}, {total}"
                drawn.add_bar(
                    x=[_bin(k) for k in range(len(counts))],
                    y=[count / total for count in counts],
                    name=f"{run}: {name}" if len(of_runs) > 1 else name,
                    meta=run,
                    marker={"color": colour_of[run], "pattern": {"shape": "/" if kind == "discarded" else ""}},
                )
    if not drawn.data:
        return None
    drawn.update_layout(
        title="Lengths of completions, up to the latest checkpoint",
        template="plotly_white",
        height=380,
        showlegend=True,
        xaxis_title="tokens",
        margin={"l": 60, "r": 20, "t": 50, "b": 90},
        yaxis_title="share of the completions",
        legend={"orientation": "h", "y": -0.2},
        xaxis_type="category",
    )
    return drawn


def _bin(k: int) -> str:
    return "1" if k == 0 else f"{2**k}-{2 ** (k + 1) - 1}"
