"""Prints plans as tables on a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from megatron_rl.planner.balance import Balanced, ParallelismPlan
from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.measure import Comparison
from megatron_rl.planner.memory import Memory, host_bytes, output_layer_bytes
from megatron_rl.planner.search import Scored, room
from megatron_rl.planner.step_time import StepTime
from megatron_rl.planner.workload import GIB, LENGTH_SPREAD, PACKING_FILL, Candidate, Workload


def print_plans(console: Console, balanced: Balanced, machine: Machine) -> None:
    """Prints the plans as a table, one row each.

    Args:
        console: Where to print.
        balanced: The plans.
        machine: The machine.
    """
    console.print(f"[bold]plans[/bold], the fastest first ({balanced.num_evaluated} layouts evaluated)")
    table = Table(box=None, padding=(0, 1))
    for name in (
        "",
        "GPUs",
        "TP",
        "PP",
        "VPP",
        "CP",
        "EP",
        "ETP",
        "DP",
        "tokens",
        "recompute",
        "GiB",
        "train s",
        "bubble",
        "servers",
        "rollouts s",
        "step s",
    ):
        table.add_column(name, justify="right")
    table.add_column("trainer limited by")
    table.add_column("idle side")
    for number, plan in enumerate(balanced.plans, 1):
        c, layout = plan.trainer.candidate, plan.trainer.candidate.layout
        sizes = (
            layout.world_size,
            layout.tp,
            layout.pp,
            layout.vpp,
            layout.cp,
            layout.ep,
            layout.etp,
            layout.dp,
            c.microbatch_tokens,
        )
        table.add_row(
            str(number),
            *map(str, sizes),
            c.recompute,
            f"{plan.trainer.memory.gib:.0f}",
            _s(plan.trainer_s),
            f"{plan.trainer.time.bubble_share:.0%}",
            f"{plan.servers} x TP {plan.server.tensor}",
            _s(plan.rollouts_s),
            _s(plan.step_s),
            plan.trainer.time.limit(),
            plan.waits,
        )
    console.print(table)
    console.print(f"each accelerator has {machine.memory_gib:.0f} GiB, of which a plan may use {room(machine) / GIB:.0f}")


def print_details(console: Console, counts: ParameterCounts, work: Workload, plan: ParallelismPlan, machine: Machine) -> None:
    """Prints one plan in full: trainer, servers, and what the prediction assumes.

    Args:
        console: Where to print.
        counts: Parameters of the model.
        work: The training step.
        plan: The plan.
        machine: The machine.
    """
    print_trainer(console, counts, work, plan.trainer, machine)
    server = plan.server
    spread = f", experts over {server.expert} ranks" if server.expert > 1 else ""
    wide = f", each over {plan.server_nodes} nodes" if plan.server_nodes > 1 else ""
    console.print(f"\n[bold]rollouts[/bold]: {plan.servers} servers of {server.tensor}{wide}{spread}")
    console.print(
        f"  weights {server.weights_gib:.1f} GiB and caches {server.cache_gib:.1f} GiB on each accelerator "
        f"({work.rollout_weights})"
    )
    console.print(
        f"  {server.sequences} sequences at once and {server.tokens_per_s:.0f} tokens/s per server; limited by {server.limit}"
    )
    console.print(
        f"  rollouts of one step: {_s(plan.rollouts_s)} s; weight update: {_s(plan.sync_s)} s "
        f"({counts.num_parameters * work.parameter_bytes / 1e9:.0f} GB through rank 0)"
    )
    print_assumptions(console, work, machine)


def print_trainer(console: Console, counts: ParameterCounts, work: Workload, scored: Scored, machine: Machine) -> None:
    """Prints memory and time of the trainer at one layout.

    Args:
        console: Where to print.
        counts: Parameters of the model.
        work: The training step.
        scored: The layout with its memory and time.
        machine: The machine.
    """
    c, layout = scored.candidate, scored.candidate.layout
    console.print(
        f"\n[bold]trainer[/bold]: {layout.world_size} ranks, {_layout_words(c)}, microbatches of {c.microbatch_tokens} tokens, "
        f"recompute {c.recompute}"
    )
    console.print(_memory_table(scored.memory, machine))
    if scored.memory.stage == layout.pp - 1 or layout.pp == 1:
        heads = output_layer_bytes(counts, work, c)
        console.print("  the output layer " + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in heads.items()))
    console.print(
        f"  host memory of a rank: {host_bytes(counts, work, c) / GIB:.0f} GiB (the node has {machine.host_memory_gib:.0f} GiB "
        "per accelerator)"
    )
    console.print(_time_table(scored.time, machine))


def _layout_words(c: Candidate) -> str:
    layout = c.layout
    uneven = [
        f"{what} stage {size} layers"
        for what, size in (("first", layout.first_stage_layers), ("last", layout.last_stage_layers))
        if size
    ]
    return ", ".join([c.describe(), *uneven])


def _memory_table(memory: Memory, machine: Machine) -> Table:
    table = _two_columns(f"memory of the fullest rank (stage {memory.stage})", "GiB")
    _rows(table, {name: size / GIB for name, size in memory.terms.items()}, "{:.2f}")
    table.add_row("sum", f"{memory.gib:.2f}", style="bold")
    table.add_row("room", f"{room(machine) / GIB:.2f}")
    return table


def _time_table(time: StepTime, machine: Machine) -> Table:
    table = _two_columns(f"one step of the trainer ({time.microbatches} microbatches)", "s")
    _rows(table, time.parts, "{:.2f}")
    table.add_row("sum", f"{time.total:.2f}", style="bold")
    table.add_row("band", f"{time.total * machine.error_low:.2f} .. {time.total * machine.error_high:.2f}")
    return table


def _two_columns(what: str, unit: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column(what)
    table.add_column(unit, justify="right")
    return table


def _rows(table: Table, values: Mapping[str, float], form: str) -> None:
    for name, value in values.items():
        if value > 0.005:
            table.add_row(name, form.format(value))


def print_assumptions(console: Console, work: Workload, machine: Machine) -> None:
    """Prints what the prediction assumes, with the options that change it.

    Args:
        console: Where to print.
        work: The training step.
        machine: The machine.
    """
    console.print("\n[bold]assumed[/bold]")
    lengths = f"prompts of {work.mean_prompt:.0f} and responses of {work.mean_response:.0f} tokens on average"
    sampled = f"{work.singletons:.0%} of the keep-sets have one id, the others {work.mean_keep_set:.0f} on average"
    known = f"between {machine.error_low} and {machine.error_high} times the predicted"
    for line in (
        f"{work.num_sequences} sequences a step, {lengths} (--mean-prompt, --mean-response)",
        f"sequence lengths L have E[L^2] = {LENGTH_SPREAD} E[L]^2; packing fills {PACKING_FILL:.0%} of a microbatch",
        f"the experts of the busiest rank get {work.imbalance} times the mean number of tokens (--imbalance)",
        f"the standard deviation of a microbatch's time is {work.unevenness:.0%} of its mean",
        sampled if work.truncated else "no top-p or top-k: full rows of logits, in chunks",
        f"{work.scoring_passes} forward passes without gradient in each step",
        f"machine {machine.name}: {machine.source}",
        f"the step times that the factors were fitted to are {known}; the times of rollouts were not compared with any run",
    ):
        console.print(f"  {line}", highlight=False)


def print_missing(console: Console, balanced: Balanced, machine: Machine) -> None:
    """Prints why no plan was found.

    Args:
        console: Where to print.
        balanced: A result without plans.
        machine: The machine.
    """
    if balanced.searched and balanced.searched.nearest:
        candidate, memory = balanced.searched.nearest
        missing = (memory.total - room(machine)) / GIB
        console.print(
            f"[bold red]no layout fits[/bold red]: the closest one, {candidate.layout.world_size} ranks as "
            f"{_layout_words(candidate)}, recompute {candidate.recompute}, lacks {missing:.1f} GiB on each rank of stage "
            f"{memory.stage}"
        )
        console.print(_memory_table(memory, machine))
    elif balanced.searched and not balanced.searched.best:
        console.print("[bold red]no layout divides the model[/bold red] over any of the numbers of ranks that were tried")
    if balanced.server is None:
        console.print(
            "[bold red]no server fits[/bold red]: the accelerators that the trainer leaves cannot hold the weights and the KV "
            "cache of one sequence"
        )


def print_comparison(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Prints predictions and measurements, the layouts that the fit used first.

    Args:
        console: Where to print.
        comparisons: Predictions and measurements of the cases.
    """
    table = Table(box=None, padding=(0, 2))
    for name in ("", "layout", "tokens", "recompute", "predicted s", "measured s", "", "predicted MiB", "measured MiB", ""):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for c in comparisons:
        candidate, mib = c.case.candidate, 1 << 20
        table.add_row(
            "fitted" if c.case.fits else "[bold]held out[/bold]",
            candidate.describe(),
            str(candidate.microbatch_tokens),
            candidate.recompute,
            f"{c.predicted_s:.2f}",
            f"{c.measured_s:.2f}{'' if c.settled else ' *'}",
            f"{c.time_error:+.0%}",
            f"{c.predicted_bytes / mib:.0f}",
            f"{c.measured_bytes / mib:.0f}",
            f"{c.memory_error:+.1%}",
        )
    console.print(table)
    if not all(c.settled for c in comparisons):
        console.print("* its two fastest runs differ: other work ran on this machine. Repeat the measurement on an idle machine.")


def _s(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"
