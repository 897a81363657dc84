"""An attribution for a person."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl.attribution.effects import METRICS, Attribution, FactorEffect

_NUMBERS = ("k1", "k3", "abs_mean", "abs_max", "ratio_mean")
_HEADS = ("k1", "k3", "mean |d|", "max |d|", "mean ratio")


def print_attribution(found: Attribution, console: Console) -> None:
    """d is log p_trainer - log p_rollout of a loss token."""
    console.print(_factors(found))
    if found.hypotheses:
        console.print(_hypotheses(found))
    console.print(_worst(found))
    for note in found.notes:
        console.print(note, markup=False, highlight=False)
    console.print(_verdict(found))


def _factors(found: Attribution) -> Table:
    tokens = found.as_trained.mismatch.num_tokens if found.as_trained.mismatch else 0
    table = _table(f"Step {found.step}, {tokens} loss tokens", "one thing changed", "accounts for, of mean |d|")
    base = found.as_trained.mismatch.abs_mean if found.as_trained.mismatch else 0.0
    if found.recorded:
        table.add_row("as the run measured it", *(_number(found.recorded[n]) if n in found.recorded else "" for n in METRICS), "")
    table.add_row(*_cells(found.as_trained), "")
    table.add_section()
    for row in found.rows:
        table.add_row(*_cells(row), _share(row, base))
    table.add_section()
    table.add_row(*_cells(found.left), _share(found.left, base))
    return table


def _hypotheses(found: Attribution) -> Table:
    table = _table("Known faults, each undone, on top of the last line", "fault", "takes away, of mean |d|")
    base = found.left.mismatch.abs_mean if found.left.mismatch else 0.0
    for row in found.hypotheses:
        table.add_row(*_cells(row), _share(row, base))
    return table


def _worst(found: Attribution) -> Table:
    table = Table(title="Worst tokens", title_justify="left")
    to_the_right = ("position", "token", "set", "stale", "log p rollout", "trainer")
    for head in ("rollout", "position", "token", "text", "set", "stale", "log p rollout", "trainer", "explained by"):
        table.add_column(head, justify="right" if head in to_the_right else "left", overflow="fold")
    for t in found.worst:
        logprobs = (f"{t.logprob_rollout:.4f}", f"{t.logprob_trainer:.4f}")
        text = escape(repr(t.text)) if t.text else ""
        explained = f"{escape(t.explained_by)} ({t.share:.0%})" if t.share else t.explained_by
        table.add_row(t.rollout, str(t.position), str(t.token), text, str(t.set_size), str(t.staleness), *logprobs, explained)
    return table


def _verdict(found: Attribution) -> str:
    if found.faults:
        return "\n".join(f"[red]FOUND[/red]: {escape(fault)}" for fault in found.faults)
    left = found.left.mismatch
    if left is None:
        return "[yellow]the weights that sampled the tokens are not known[/yellow]"
    if left.abs_mean <= found.rounding:
        return f"[green]what is left is rounding[/green]: mean |d| {_number(left.abs_mean)}, at most {_number(found.rounding)}"
    return (
        f"[red]mean |d| {_number(left.abs_mean)} remains[/red] (rounding: {_number(found.rounding)}), which no single known "
        "fault explains"
    )


def _table(title: str, first: str, last: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for head in (*_HEADS, last):
        table.add_column(head, justify="right")
    return table


def _cells(row: FactorEffect) -> tuple[str, ...]:
    if row.mismatch is None:
        return (f"{escape(row.name)}: [dim]not applicable: {escape(row.reason)}[/dim]", *[""] * len(_NUMBERS))
    return (escape(row.name), *(_number(getattr(row.mismatch, name)) for name in _NUMBERS))


def _share(row: FactorEffect, base: float) -> str:
    if row.accounts_for is None:
        return ""
    if row.accounts_for < 0:
        return f"adds {_number(-row.accounts_for)}"
    return f"{_number(row.accounts_for)} ({row.accounts_for / base:.0%})" if base else "0"


def _number(value: float) -> str:
    return f"{value:.3g}"
