"""The command line."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.config import ConfigError, RunFolder, check_own_config, load_config, run_folder
from megatron_rl.launch.error_report import reporting_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Asynchronous RL of large mixture-of-experts models: Megatron-Core trains, vLLM samples, both score the same policy.

A run is one TOML file; every value in it can be overridden on the command line:

    megatron-rl train model_configs/tiny-moe-cpu.toml --rollouts.top_p 0.9 --run.name narrower

Begin with `megatron-rl train CONFIG --dry-run`, which starts nothing and prints what would run where.""",
)
convert = typer.Typer(no_args_is_help=True, help="Hugging Face folders to Megatron checkpoints, and back.")
app.add_typer(convert, name="convert")
servers = typer.Typer(no_args_is_help=True, help="Add or remove rollout servers while a run continues.")
app.add_typer(servers, name="servers")

Overrides = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=Overrides)
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A TOML file, for example model_configs/tiny-moe-cpu.toml.", show_default=False)],
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint in the run's folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print configuration, layout and processes; start nothing.")] = False,
) -> None:
    """Train a policy: rollouts by vLLM, training by Megatron-Core, at the same time.

    Further arguments override the file: `--section.key value` (TOML notation; `none` removes a key).
    Everything that the run writes is in `run.folder/run.name`. Ctrl-C stops all processes, after a checkpoint.
    A finished or stopped run continues with: `megatron-rl train runs/NAME/config.toml --resume`.
    """
    from megatron_rl.launch.local import dry_run_text, run_locally

    with reporting_errors() as errors:
        loaded = load_config(config, context.args)
        if dry_run:
            typer.echo(dry_run_text(loaded))
            return
        errors.run = folder = run_folder(loaded)
        if resume:
            check_own_config(config, folder)
        run_locally(loaded, folder, resume)


@app.command(context_settings=Overrides)
def launch(
    context: typer.Context,
    config: Annotated[
        Path, typer.Argument(help="A TOML file with a [slurm] section, or one that --profile completes.", show_default=False)
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            envvar="MEGATRON_RL_PROFILE",
            help="A site's TOML file with only a [slurm] section; the values of the run's own file override it.",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="'section.key=[value, value]': a job for each value, or for each combination.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint in the run's folder.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the batch script as sbatch would get it, and on stderr the GPUs of each process; submit nothing.",
        ),
    ] = False,
) -> None:
    """Submit a run to Slurm, as one heterogeneous job: trainer nodes, with the orchestrator on the first, and rollout nodes.

    Further arguments override the file, as in `train`. `run.folder` has to be on a filesystem that all nodes share. Before its
    time limit, and when it is preempted, the job saves and requeues itself; `megatron-rl status`, `logs` and `stop` work from
    the login node.
    """
    from megatron_rl.launch.slurm import options_from_environment
    from megatron_rl.launch.submit import planned_devices, submissions, submit, warning_about

    with reporting_errors():
        for job in submissions(config, context.args, sweep or [], profile, resume):
            if warning := warning_about(job.folder):
                typer.secho(f"megatron-rl: {warning}", fg="yellow", err=True)
            for change in job.changes:
                typer.echo(f"changed: {change}", err=True)
            if dry_run:
                for line in planned_devices(job.config).lines():
                    typer.echo(line, err=True)
                typer.echo(job.script, nl=False)
            else:
                for option in options_from_environment(os.environ):
                    typer.echo(f"from the environment, for sbatch: {option}", err=True)
                typer.echo(f"{job.folder.path}: job {submit(job)}")


@app.command(context_settings=Overrides)
def replay(
    context: typer.Context,
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run, for example runs/tiny-moe-cpu.", show_default=False)],
    from_step: Annotated[int, typer.Option(help="First step: 0, or the step of a kept checkpoint.", show_default=False)],
    steps: Annotated[
        int | None, typer.Option(help="Number of steps; all recorded ones, if not given.", show_default=False)
    ] = None,
) -> None:
    """Rerun recorded steps without servers, and name the first tensor that differs from what was recorded.

    Further arguments override the run's configuration, for example `--layout.expert 1`: another layout takes sums in another
    order, and what differs is shown with its size. The exit status is 0 only if every step gave what was recorded.
    """
    from megatron_rl.launch.replay import replay_run

    with reporting_errors(RunFolder(run_dir)):
        equal = replay_run(RunFolder(run_dir), context.args, from_step, steps, typer.echo)
    if not equal:
        raise typer.Exit(1)


RunDir = Annotated[Path, typer.Argument(help="The folder of a run, for example runs/tiny-moe-cpu.", show_default=False)]


@app.command()
def status(run_dir: RunDir) -> None:
    """Show the state of a run: step, servers, latest checkpoint, and whether it is still running."""
    from megatron_rl.launch.run_control import status_text

    with reporting_errors(RunFolder(run_dir)):
        typer.echo(status_text(RunFolder(run_dir)))


@app.command()
def stop(run_dir: RunDir) -> None:
    """Stop a run: it finishes its step and saves; `train` or `launch` with `--resume` continues from there."""
    from megatron_rl.launch.run_control import stop_run

    with reporting_errors(RunFolder(run_dir)):
        typer.echo(stop_run(RunFolder(run_dir)))


@servers.command("add")
def add_servers(
    run_dir: RunDir,
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
) -> None:
    """Start more servers. Each gets the current weights and is verified before it samples."""
    from megatron_rl.launch.run_control import change_servers
    from megatron_rl.orchestrator import ServersRequest

    with reporting_errors(RunFolder(run_dir)):
        typer.echo(change_servers(RunFolder(run_dir), ServersRequest("add", count=count)))


@servers.command("remove")
def remove_servers(
    run_dir: RunDir,
    which: Annotated[
        list[str], typer.Argument(metavar="SERVER...", help="A number as in logs/server-N, or a URL.", show_default=False)
    ],
) -> None:
    """Stop servers at once. The others sample again what these had begun; the last server cannot be removed."""
    from megatron_rl.launch.run_control import change_servers
    from megatron_rl.orchestrator import ServersRequest

    with reporting_errors(RunFolder(run_dir)):
        typer.echo(change_servers(RunFolder(run_dir), ServersRequest("remove", which=tuple(which))))


@app.command()
def logs(
    run_dir: RunDir,
    name: Annotated[
        str | None, typer.Argument(help="trainer-0, server-0, worker-0, ...; events, if not given.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue as it grows, until Ctrl-C.")] = False,
) -> None:
    """Print a log of a run: its events, or one process's output."""
    from megatron_rl.launch.run_control import show_logs

    with reporting_errors(RunFolder(run_dir)):
        show_logs(RunFolder(run_dir), name, follow, typer.echo)


FormerInjectFault = Annotated[str | None, typer.Option("--plant", hidden=True)]


@app.command(context_settings=Overrides)
def attribute(
    context: typer.Context,
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run, for example runs/tiny-moe-cpu.", show_default=False)],
    step: Annotated[int, typer.Option(help="The recorded step whose rollouts are scored.", show_default=False)],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here, as JSON.", show_default=False)] = None,
    retrain: Annotated[int, typer.Option(min=0, help="Steps to rerun at most, for weights that no checkpoint holds.")] = 20,
    inject_fault: Annotated[
        str | None,
        typer.Option(
            help="Inject a fault, to see it named: swapped-gate-up, shifted-routes, one-sided-temperature, "
            "unreduced-expert-grad.",
            show_default=False,
        ),
    ] = None,
    plant: FormerInjectFault = None,
) -> None:
    """Show where the mismatch of a step comes from: its rollouts are scored again with one thing changed at a time.

    Changed are: routing replay, keep-set replay, temperature, staleness (each token under the weights that sampled it),
    quantisation,
    dropout, layout. Where more than rounding remains when all of it is replayed, known faults are undone one by one, and the
    one that was there is named. Further arguments override the run's configuration, for example `--layout.world_size 1
    --layout.expert 1`. Exit status 1 when a fault is found, or more than rounding remains.
    """
    from megatron_rl.launch.attribute import attribute_and_print

    with reporting_errors(RunFolder(run_dir)):
        fault = _renamed("--plant", plant, "--inject-fault", inject_fault)
        clean = attribute_and_print(RunFolder(run_dir), context.args, step, retrain=retrain, fault=fault, json_file=json_file)
    if not clean:
        raise typer.Exit(1)


@app.command(context_settings=Overrides)
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(help="The TOML file of a run; without it, the machine alone is looked at.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show what this machine has, and for a configuration which GPUs each process gets and what keeps it from running here.

    Shown are Python, torch, vLLM and Transformer Engine with their builds, NVIDIA driver, CUDA, NCCL, GPUs and their memory,
    NVLink, InfiniBand, FP4, and which fused parts a trainer uses. What is not found has a reason. It needs neither torch nor a
    GPU. Further arguments override the file, as in `train`. Exit status 1 when `train` could not run the configuration here.
    """
    from megatron_rl.launch.doctor import diagnose

    with reporting_errors():
        found = diagnose(load_config(config, context.args) if config else None)
    typer.echo(json.dumps(found.as_json(), indent=2) if as_json else "\n".join(found.lines()))
    if not found.can_run:
        raise typer.Exit(1)


@app.command(context_settings=Overrides)
def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="The TOML file of the run that is to be submitted.", show_default=False)],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here, as JSON.", show_default=False)] = None,
    no_server: Annotated[bool, typer.Option("--no-server", help="Leave out the stage with a real vLLM server.")] = False,
    inject_fault: Annotated[
        str | None,
        typer.Option(
            help="Inject a fault, to see the check fail: swapped-gate-up, shifted-routes, one-sided-temperature, "
            "unreduced-expert-grad.",
            show_default=False,
        ),
    ] = None,
    plant: FormerInjectFault = None,
) -> None:
    """Prove model and layout on a small copy of the run, on this machine's CPU, before a job is submitted.

    The copy has the run's model family with all its features, a few small layers, and every parallel size above 1 as 2. Stages:
    *conversion* (Hugging Face to Megatron and back, to the last bit), *forward* (against transformers in float64), *layout*
    (against one rank), *replay* (experts, keep-sets, temperature), *sync* (one update of a real vLLM server, where vLLM's CPU
    build is installed). Further arguments override the file, as in `train`. Exit status 1 when a stage fails.
    """
    from megatron_rl.launch.check import check_and_print

    with reporting_errors():
        fault = _renamed("--plant", plant, "--inject-fault", inject_fault)
        passed = check_and_print(load_config(config, context.args), fault=fault, with_server=not no_server, json_file=json_file)
    if not passed:
        raise typer.Exit(1)


@app.command(context_settings=Overrides)
def plan(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="The TOML file of the run.", show_default=False)],
    gpus: Annotated[int | None, typer.Option(help="Accelerators for trainer and servers together.", show_default=False)] = None,
    gpu_type: Annotated[str, typer.Option(help="A table of megatron_rl/planner/machines.toml, or of --machines.")] = "h200",
    nodes_of: Annotated[int, typer.Option(help="Accelerators per node.")] = 8,
    context_tokens: Annotated[
        int | None, typer.Option("--context", help="Tokens of the longest sequence, instead of model.max_sequence_length.")
    ] = None,
    trainer_gpus: Annotated[int | None, typer.Option(help="Accelerators of the trainer; chosen, if not given.")] = None,
    mean_prompt: Annotated[float | None, typer.Option(help="Mean tokens of a prompt; at most 512, if not given.")] = None,
    mean_response: Annotated[
        float | None, typer.Option(help="Mean tokens of a response; half of what fits, if not given.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or muon, instead of the configuration's.")] = None,
    rollout_weights: Annotated[str | None, typer.Option(help="bf16, fp8 or nvfp4: what the servers hold.")] = None,
    imbalance: Annotated[float, typer.Option(help="Tokens of the busiest rank's experts over the mean.")] = 1.2,
    machines: Annotated[Path | None, typer.Option(help="A TOML file with your own machines.")] = None,
    explain: Annotated[
        str | None, typer.Option(help="Explain one layout, TP=8,PP=4,...; 'config' for the file's own.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(help="Number of plans to show.")] = 5,
    write: Annotated[bool, typer.Option("--write", help="Write the first plan into the configuration file.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's CPU instead, and write its table to --machines, a new file.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw memory and a step's timeline: an .svg or .png file.")] = None,
) -> None:
    """Choose a layout before submitting a job: memory of every rank, time of a step, nodes for trainer and servers.

    Of the model only config.json is read. Further arguments override the file, as in `train`. Exit status 1 when nothing fits,
    and with `--measure` when the prediction for a layout that was not fitted is off by more than 25 % (time) or 10 % (memory).
    """
    from megatron_rl.launch.plan import Assumed, measure_and_print, plan_and_print, request_of, work_of

    with reporting_errors():
        loaded = load_config(config, context.args)
        if measure:
            good = measure_and_print(loaded, machines)
        else:
            request = request_of(gpus, gpu_type, nodes_of, machines, trainer_gpus, top)
            assumed = Assumed(context_tokens, mean_prompt, mean_response, optimizer, rollout_weights, imbalance)
            work = work_of(loaded, assumed)
            good = plan_and_print(config, loaded, work, request, explain=explain, write=write, picture=picture)
    if not good:
        raise typer.Exit(1)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs, shown side by side.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML file of one or several runs: plots over steps, rollouts token by token, configurations.

    It needs no network.
    """
    from megatron_rl.report import write_report

    with reporting_errors():
        written = write_report([RunFolder(path) for path in run_dirs], out)
    for remark in written.remarks:
        typer.secho(f"megatron-rl: {remark}", fg="yellow", err=True)
    typer.echo(f"{out}: {written.num_bytes / 1e6:.1f} MB")


@app.command()
def tokenizer(
    folder: Annotated[Path, typer.Argument(help="A model folder without tokenizer.json.", show_default=False)],
    pattern: Annotated[
        str | None,
        typer.Option(help="The expression by which tiktoken splits text; none: that of the folder's tokenization_*.py."),
    ] = None,
) -> None:
    """Make tokenizer.json from tiktoken.model or a SentencePiece model, and prove that it gives the same ids.

    Kimi-K2 and Moonlight are published without tokenizer.json, which runs and servers read. Nothing of the folder's code is run.
    The new file is compared with tiktoken or SentencePiece on text in many scripts, code, numbers, white space, and on all
    special tokens; where one differs, it is named and nothing is written.
    """
    from megatron_rl.conversion.tokenizer_file import make_tokenizer

    with reporting_errors():
        proof = make_tokenizer(folder, pattern)
        typer.echo(
            f"{folder / 'tokenizer.json'}: written; the same ids and text as {proof.kind} with {proof.file.name} on "
            f"{proof.num_texts} texts ({proof.num_ids} ids), {proof.num_special_tokens} special tokens among them"
        )


@convert.command("hf-to-megatron")
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder: config.json, safetensors.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to create: checkpoint, config.json and tokenizer.", show_default=False)],
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")] = False,
) -> None:
    """Write a Megatron dist-checkpoint of a Hugging Face model."""
    from megatron_rl.launch.convert import convert_hf_to_megatron

    with reporting_errors():
        convert_hf_to_megatron(source, out, resume)


@convert.command("megatron-to-hf")
def megatron_to_hf(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint of a run (checkpoints/step_...) or of hf-to-megatron.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Hugging Face folder to create.", show_default=False)],
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")] = False,
    quantize: Annotated[
        str | None, typer.Option(help="nvfp4: four-bit matrices, for servers that load them.", show_default=False)
    ] = None,
    quantize_layout: Annotated[
        str, typer.Option(help="Names and scales of quantised tensors: modelopt or compressed-tensors.")
    ] = "modelopt",
    quantize_modules: Annotated[
        str | None,
        typer.Option(
            help="Linear layers, separated by commas: attention,mlp,experts. The run's, if not given.", show_default=False
        ),
    ] = None,
    quantize_exclude: Annotated[
        str | None,
        typer.Option(help="Modules to leave unquantised, separated by commas. The run's, if not given.", show_default=False),
    ] = None,
) -> None:
    """Write a Megatron dist-checkpoint as a Hugging Face folder, unquantised or quantised.

    The run's [precision] selects what is quantised: the values are those that its trainer computed with, to the last bit.
    """
    from megatron_rl.launch.convert import convert_megatron_to_hf, quantised_as

    with reporting_errors():
        if quantize not in (None, "nvfp4"):
            raise ConfigError(f"--quantize {quantize}: the only format is nvfp4")
        names = [
            words if words is None else [word for word in words.split(",") if word]
            for words in (quantize_modules, quantize_exclude)
        ]
        if quantize is None and (quantize_layout != "modelopt" or names != [None, None]):
            raise ConfigError("--quantize-layout, --quantize-modules and --quantize-exclude need --quantize nvfp4")
        convert_megatron_to_hf(source, out, resume, quantised_as(source, quantize_layout, *names) if quantize else None)


def _renamed(former: str, former_value: str | None, name: str, value: str | None) -> str | None:
    """The value of a renamed option. Its former name is still taken, with one line that names the new one."""
    if former_value is None:
        return value
    typer.secho(f"megatron-rl: {former} is now called {name}", fg="yellow", err=True)
    return former_value if value is None else value


def main() -> None:
    """The program `megatron-rl`."""
    app()


if __name__ == "__main__":
    main()
