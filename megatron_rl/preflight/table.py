"""Prints the report of a check as a table."""

from rich.console import Console
from rich.table import Table

from megatron_rl.preflight.results import CheckReport, StageResult


def print_report(report: CheckReport, console: Console) -> None:
    """Prints the report as a table, and the errors of aborted stages.

    Args:
        report: The results.
        console: Where to print.
    """
    table = Table(
        title="megatron-rl check" + (f" --inject-fault {report.injected_fault}" if report.injected_fault else ""),
        title_justify="left",
        show_lines=False,
    )
    for column in ("stage", "what", "value", "bound", "", "s"):
        table.add_column(column, justify="right" if column in ("value", "bound", "s") else "left", overflow="fold")
    for stage in report.stages:
        for row in _rows(stage):
            table.add_row(*row)
        table.add_section()
    console.print(_small_run(report))
    console.print(table)
    for stage in report.stages:
        if stage.aborted:
            console.print(f"[red]{stage.name}[/red] was aborted by an error:")
            console.print(stage.note, markup=False, highlight=False)
    outcome = "[green]all stages passed[/green]" if not report.failed else f"[red]failed: {', '.join(report.failed)}[/red]"
    console.print(outcome)


def _rows(stage: StageResult) -> list[tuple[str, ...]]:
    if stage.skipped or stage.aborted:
        mark = "[yellow]skipped[/yellow]" if stage.skipped else "[red]FAILED[/red]"
        return [(stage.name, stage.note if stage.skipped else "aborted, see below", "", "", mark, f"{stage.seconds:.0f}")]
    rows: list[tuple[str, ...]] = []
    for number, m in enumerate(stage.measurements):
        first = number == 0
        bound = f"{'>=' if m.at_least else '<='} {m.bound:.3g}"
        mark = "[green]ok[/green]" if m.passed else "[red]FAILED[/red]"
        rows.append((stage.name if first else "", m.what, f"{m.value:.3g}", bound, mark, f"{stage.seconds:.0f}" if first else ""))
    return rows


def _small_run(report: CheckReport) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in report.layout.items() if value not in (None, 1, False))
    model = report.model
    name = f"{model['model_type']}, {model['num_hidden_layers']} layers of width {model['hidden_size']}"
    return f"{name}; layout: {sizes or 'one rank'}"
