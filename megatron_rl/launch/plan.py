"""`megatron-rl plan`: layouts for a configuration and a number of accelerators, on the terminal and in the file."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from megatron_rl.config import Config, ConfigError
from megatron_rl.conversion.model_files import hf_config_of, where_hf_config_is_from
from megatron_rl.errors import accessing, check_output_file
from megatron_rl.metrics import wide_console
from megatron_rl.planner import Machine, ParameterCounts, Workload, balance, candidate_of, machine_named, workload_of
from megatron_rl.planner.choice import write_choice
from megatron_rl.planner.machine import to_toml
from megatron_rl.planner.measure import measure_machine
from megatron_rl.planner.optimizers import OPTIMIZERS
from megatron_rl.planner.picture import check_format, draw
from megatron_rl.planner.requests import named_candidate
from megatron_rl.planner.rollouts import WEIGHT_BYTES
from megatron_rl.planner.search import evaluate_candidate, room, smallest_fitting_search
from megatron_rl.planner.text import print_assumptions, print_comparison, print_details, print_missing, print_plans, print_trainer
from megatron_rl.planner.workload import GIB
from megatron_rl.weight_mapping import ParameterTable


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    gpus: int
    node: int
    machine: Machine
    trainer_gpus: int | None
    top: int


def plan_and_print(
    file: Path, config: Config, work: Workload, request: Request, *, explain: str | None, write: bool, picture: Path | None
) -> bool:
    """Search for plans, and print them.

    Args:
        file: The configuration file.
        config: Its content.
        work: The workload.
        request: Accelerators, and the number of plans.
        explain: Print this layout instead of a search.
        write: Write the first plan into `file`.
        picture: Draw the first plan into this file; None: do not.

    Returns:
        Whether there is a plan; with `explain`, whether the layout fits.

    Raises:
        ConfigError: The layout cannot be explained.
        FileAccessError: `file` or `picture` cannot be written.
    """
    console = wide_console()
    if picture is not None:
        check_format(picture)  # before the search
    counts = ParameterCounts(hf_config_of(config))
    if source := where_hf_config_is_from(config):
        console.print(source, highlight=False, markup=False)
    _say_what_is_not_counted(console, config)
    if explain is not None and write:
        raise ConfigError("--write writes the planner's first plan, and --explain makes none; leave one of them out")
    if explain is not None:
        return _explain(console, counts, work, request, explain, config)
    balanced = balance(
        counts, work, request.machine, request.gpus, request.node, trainer_gpus=request.trainer_gpus, keep=request.top
    )
    if not balanced.plans:
        print_missing(console, balanced, request.machine)
        _print_nearest_feasible(console, counts, work, request)
        return False
    print_plans(console, balanced, request.machine)
    best = balanced.plans[0]
    print_details(console, counts, work, best, request.machine)
    if picture is not None:
        with accessing(picture, "choose another file for --picture"):
            draw(picture, counts, work, best.trainer, request.machine)
        console.print(f"\npicture: {picture}")
    if write:
        with accessing(file, "--write writes a file next to the configuration and renames it; plan from a copy elsewhere"):
            write_choice(file, best, longest_sequence=work.longest_sequence)
        console.print(f"\nwritten into {file}")
    return True


def measure_and_print(config: Config, out: Path | None) -> bool:
    """Measure this machine's CPU, and print measured and predicted times.

    Args:
        config: Of the run.
        out: The new file for the fitted machine; None: print it.

    Returns:
        Whether all layouts outside the fit were predicted well.

    Raises:
        ConfigError: `out` exists.
        FileAccessError: `out` cannot be written.
    """
    if out is not None and out.exists():
        raise ConfigError(f"--machines {out} exists already; --measure writes a new file")
    if out is not None:
        check_output_file("--machines", out)
    console = wide_console()
    with console.status("starting") as status:
        machine, comparisons = measure_machine(config, hf_config_of(config), machine_named("cpu"), status.update)
    print_comparison(console, comparisons)
    if out is None:
        console.print(to_toml(machine), highlight=False, markup=False)
    else:
        with accessing(out, "choose another file for --machines"):
            out.write_text(to_toml(machine))
        console.print(f"written: {out}; plan with it by --machines {out} --gpu-type {machine.name}")
    return all(comparison.is_good for comparison in comparisons if not comparison.case.fits)


def _explain(console: Console, counts: ParameterCounts, work: Workload, request: Request, text: str, config: Config) -> bool:
    default = request.trainer_gpus or (min(request.gpus, config.layout.world_size))
    candidate = candidate_of(config) if text == "config" else named_candidate(text, work, default)
    if text != "config" and candidate.layout.world_size > request.gpus:
        raise ConfigError(f"--explain {text}: {candidate.layout.world_size} ranks are more than --gpus {request.gpus}")
    scored = evaluate_candidate(counts, work, request.machine, candidate)
    print_trainer(console, counts, work, scored, request.machine)
    print_assumptions(console, work, request.machine)
    missing = scored.memory.total - room(request.machine)
    if missing > 0:
        console.print(
            f"\n[bold red]does not fit[/bold red]: {missing / GIB:.1f} GiB too much on each rank of stage {scored.memory.stage}"
        )
        return False
    searched = (
        balance(counts, work, request.machine, request.gpus, request.node, trainer_gpus=candidate.layout.world_size, keep=1)
        if candidate.layout.world_size < request.gpus
        else None
    )
    if searched and searched.plans:
        best = searched.plans[0].trainer
        console.print(
            f"\nfits; the planner's own choice on as many ranks: {best.candidate.describe()}, {best.seconds:.1f} s, "
            f"compared with {scored.seconds:.1f} s"
        )
    else:
        console.print("\nfits")
    return True


def _say_what_is_not_counted(console: Console, config: Config) -> None:
    if config.model.mtp != "trained":
        return
    with_mtp, without = (ParameterTable(hf_config_of(config), with_mtp=wanted).num_parameters for wanted in (True, False))
    if with_mtp > without:
        console.print(
            "[yellow]not counted[/yellow]: layers for multi-token prediction (model.mtp = 'trained'), "
            f"{(with_mtp - without) / 1e9:.3g} billion parameters. Each costs as much as a last layer and the output layer "
            "once more, on the last stage: give that stage as many layers fewer (layout.last_stage_layers), and leave memory "
            "free\n"
        )


def _print_nearest_feasible(console: Console, counts: ParameterCounts, work: Workload, request: Request) -> None:
    """Print the plan on more accelerators of the same type."""
    gpus = request.gpus
    while gpus < 64 * request.gpus and gpus < 16384:
        gpus *= 2
        larger = balance(counts, work, request.machine, gpus, request.node, keep=1)
        if larger.plans:
            plan = larger.plans[0]
            ranks = plan.trainer.candidate.layout.world_size
            console.print(f"\n[bold]the nearest that fits[/bold]: --gpus {gpus}, {ranks} of them for the trainer")
            print_plans(console, larger, request.machine)
            return
    if smallest_fitting_search(counts, work, request.machine, gpus, request.node) is None:
        console.print(
            "\nnothing fits on any number of these accelerators: shorten the sequences, or use accelerators with more memory"
        )


def request_of(gpus: int | None, gpu_type: str, node: int, machines: Path | None, trainer_gpus: int | None, top: int) -> Request:
    """The options of the command line, checked.

    Raises:
        ConfigError: Lists everything that is out of range.
        MachineError: The machine is not known.
    """
    if gpus is None:
        raise ConfigError("--gpus is missing: the number of accelerators of trainer and servers together, for example --gpus 64")
    wrong = [f"--{name} {value}: 1 or more" for name, value in (("gpus", gpus), ("nodes-of", node), ("top", top)) if value < 1]
    if gpus == 1:
        wrong.append("--gpus 1: trainer and servers need an accelerator each")
    if trainer_gpus is not None and not 0 < trainer_gpus < gpus:
        wrong.append(f"--trainer-gpus {trainer_gpus}: at least 1, and fewer than --gpus {gpus}, which the servers share")
    if gpus > node > 0 and gpus % node:
        wrong.append(f"--gpus {gpus} is not a multiple of --nodes-of {node}")
    if wrong:
        raise ConfigError("; ".join(wrong))
    return Request(gpus, node, machine_named(gpu_type, machines), trainer_gpus, top)


@dataclass(frozen=True)
class Assumed:
    """The workload's options on the command line; None: the configuration's value, or an assumption that is printed."""

    context: int | None
    mean_prompt: float | None
    mean_response: float | None
    optimizer: str | None
    rollout_weights: str | None
    imbalance: float


def work_of(config: Config, assumed: Assumed) -> Workload:
    """The workload by the configuration and the options.

    Raises:
        ConfigError: Lists every option that is not possible.
    """
    wrong = []
    for name, value, known in (
        ("optimizer", assumed.optimizer, tuple(OPTIMIZERS)),
        ("rollout-weights", assumed.rollout_weights, tuple(WEIGHT_BYTES)),
    ):
        if value is not None and value not in known:
            wrong.append(f"--{name} {value} is not known; known are {', '.join(known)}")
    amounts = {"context": assumed.context, "mean-prompt": assumed.mean_prompt, "mean-response": assumed.mean_response}
    wrong += [
        f"--{name} {value}: 1 or more" for name, value in amounts.items() if value is not None and not 1 <= value < math.inf
    ]
    longest_response = config.rollouts.max_new_tokens
    if assumed.context is not None and 1 <= assumed.context <= longest_response:
        wrong.append(
            f"--context {assumed.context}: a prompt and a response of rollouts.max_new_tokens = {longest_response} do not fit "
            f"into it; raise it above {longest_response}, or plan shorter responses with --rollouts.max_new_tokens N"
        )
    if not 1 <= assumed.imbalance < math.inf:
        wrong.append(f"--imbalance {assumed.imbalance}: the busiest rank has at least the mean, 1.0")
    if wrong:
        raise ConfigError("; ".join(wrong))
    work = workload_of(config, **asdict(assumed))
    if work.mean_tokens > work.longest_sequence:
        raise ConfigError(
            f"prompts of {work.mean_prompt:.0f} and responses of {work.mean_response:.0f} tokens on average are longer than the "
            f"longest sequence, {work.longest_sequence}; shorten them, or raise --context"
        )
    return work
