"""A run on this machine: one process checks everything, then starts, watches and stops it."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.batching import Spool
from megatron_rl.config import Config, ConfigError, RunFolder, changes_on_resume, check_startable, run_folder, to_toml
from megatron_rl.inference.registry import engine_of
from megatron_rl.launch.builds import check_builds, installed_builds, unfit_builds
from megatron_rl.launch.error_report import USER_ERROR
from megatron_rl.launch.machines import ThisMachine
from megatron_rl.launch.run import run
from megatron_rl.metrics import check_sinks
from megatron_rl.orchestrator import devices_for, gpus_of_run, local_plan, server_process, trainer_processes, worker_process
from megatron_rl.processes import DevicePlan, GpuQueryError, ProcessError, check_host, check_port, kill_with_parent
from megatron_rl.tasks import load_task
from megatron_rl.topology import Layout

TEXT_NOTES = ("first_prompt", "end_of_turn")
"""Names in what the check of the model prints (`conversion.run_text`)."""


def run_locally(config: Config, folder: RunFolder, resume: bool) -> None:
    """Train until the last step, Ctrl-C, or a failure.

    Args:
        config: Of the run.
        folder: Of the run.
        resume: Continue from the latest checkpoint.

    Raises:
        UserError: The run could not be started.
        RunError: The run failed.
    """
    check_before_start(config)
    check_builds(config, installed_builds())
    plan = local_plan(config, devices_for(config))
    check_startable(folder, resume)
    with folder.claimed():
        check_startable(folder, resume)  # once more: another process may just have started it
        changes = changes_on_resume(folder, config) if resume else []
        notes = prepare_folder(config, folder)
        machines = ThisMachine(config, folder, plan)
        asyncio.run(run(config, folder, machines, resume=resume, stop_signals=stop_signals(), changes=changes, notes=notes))


def stop_signals() -> list[int]:
    """The signals of Ctrl-C, `megatron-rl stop`, and a closed terminal, unless nohup ignores that one."""
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if ends_with_terminal else [])]


def prepare_folder(config: Config, folder: RunFolder) -> list[str]:
    """Write the run's folder with its model, its configuration and an empty spool, private to the user.

    The configuration is last: where the preparation fails, an existing run stays as it was, and a new one's name stays free.

    Returns:
        What the policy reads, one line each, for the log.

    Raises:
        UserError: The model does not fit, or the folder cannot be written.
        ProcessError: The check of the model was killed.
    """
    folder.make()
    with _config_file(config) as file:
        model = prepare_model(file, folder)
    folder.create(config)
    folder.job_file.unlink(missing_ok=True)  # it was a Slurm job, and continues here
    Spool(folder.path).create()
    return text_notes(model)


def text_notes(model: Mapping[str, object]) -> list[str]:
    """Of what `prepare_model` returns, the lines on the text that the policy reads."""
    return [str(model[name]) for name in TEXT_NOTES if name in model]


def check_before_start(config: Config) -> None:
    """Check the task, the reward function, the engine, W&B, and this machine's host and ports before anything starts.

    Raises:
        UserError: One of them cannot be used as configured.
    """
    check_on_any_machine(config)
    check_host(config.servers.host, "servers.host")
    for slot in range(config.servers.count if config.servers.first_port else 0):
        check_port(config.servers.host, config.servers.first_port + slot, f"servers.first_port, server {slot}")


def check_on_any_machine(config: Config) -> None:
    """Check what does not depend on the machine that runs it: the task, the reward function, the engine, and W&B.

    Raises:
        UserError: One of them cannot be used as configured.
    """
    task = load_task(config.task, config.run.seed)
    if config.supervised.steps:
        task.solution(0)  # a template that cannot be filled fails here, not in the first supervised step
    engine_of(config)
    check_sinks(config)


def prepare_model(config_file: Path, folder: RunFolder | None, *, is_dry: bool = False) -> dict[str, object]:
    """Check the model and write it into the run's folder; in a separate process, since this one does not load torch.

    Args:
        config_file: The configuration of the run.
        folder: Of the run; None: only check.
        is_dry: The published config.json is enough where the model's folder does not exist.

    Returns:
        What the model is and how the layout divides it.

    Raises:
        ConfigError: Model, layout and configuration do not fit one another.
        ProcessError: The process was killed.
    """
    argv = [sys.executable, "-m", "megatron_rl.launch.prepare", str(config_file), *([str(folder.path)] if folder else [])]
    argv += ["--dry-run"] if is_dry else []
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=kill_with_parent())
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ProcessError(f"the check of the model was killed by {name}; SIGKILL: this machine may have run out of memory")
    if done.returncode == USER_ERROR:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        error = RuntimeError(f"the check of the model failed: {(done.stderr.splitlines() or ['without a message'])[-1]}")
        error.add_note(f"{' '.join(argv)} ended with status {done.returncode}:\n{done.stderr}")
        raise error
    return json.loads(done.stdout.splitlines()[-1])


def checked_model(config: Config, *, is_dry: bool = False) -> dict[str, object]:
    """What the model is and how the layout divides it; nothing is written. `is_dry` as in `prepare_model`.

    Raises:
        ConfigError: Model, layout and configuration do not fit one another.
        ProcessError: The process of the check was killed.
    """
    with _config_file(config) as file:
        return prepare_model(file, None, is_dry=is_dry)


@contextmanager
def _config_file(config: Config) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.toml"
        file.write_text(to_toml(config))
        yield file


def dry_run_devices(config: Config) -> tuple[DevicePlan, list[str]]:
    """Which GPUs each process would get, and what keeps this machine from running the configuration, one line each.

    Where this machine has no GPU, as many as the run needs are presumed.

    Raises:
        DevicePlanError: This machine has GPUs, but too few.
    """
    notes = [f"this machine cannot start the run: {wrong}" for wrong in unfit_builds(config, installed_builds())]
    try:
        devices, reason = devices_for(config), "it has no GPU"
    except GpuQueryError as error:
        devices, reason = (), str(error)
    if devices or config.device == "cpu":
        return local_plan(config, devices), notes
    needed = gpus_of_run(config)
    notes.append(f"this machine cannot start the run: {reason}; below, a machine with {needed} GPUs is presumed")
    return local_plan(config, [str(index) for index in range(needed)], "a machine that is presumed"), notes


MOST_RANK_LINES = 32
"""Of more ranks, what stages and expert-parallel ranks hold is printed, and not each rank."""


def _rank_lines(layout: Layout, num_layers: int, num_experts: int) -> list[str]:
    coords = [layout.coords_of(rank) for rank in range(layout.world_size)]
    layers = [layout.layers_of_stage(num_layers, stage) for stage in range(layout.pp)]
    of_stage = [f"layers {held[0]}..{held[-1]}" for held in layers]
    of_expert_rank = [
        f"experts {held.start}..{held.stop - 1}"
        for held in (layout.experts_of(num_experts, ep) for ep in range(layout.ep if num_experts else 0))
    ]
    if layout.world_size <= MOST_RANK_LINES:
        return [
            ", ".join(
                [
                    f"rank {rank}: tp {c.tp}, cp {c.cp}, dp {c.dp}, pp {c.pp}, ep {c.ep}",
                    of_stage[c.pp],
                    *of_expert_rank[c.ep :][:1],
                ]
            )
            for rank, c in enumerate(coords)
        ]
    lines = [
        f"pp {pp}: {held}, ranks {_ranges([rank for rank, c in enumerate(coords) if c.pp == pp])}"
        for pp, held in enumerate(of_stage)
    ]
    return lines + [
        f"ep {ep}: {held}, ranks {_ranges([rank for rank, c in enumerate(coords) if c.ep == ep])}"
        for ep, held in enumerate(of_expert_rank)
    ]


def _ranges(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 6] as "0..2, 6"."""
    first_of = [rank for rank in ranks if rank - 1 not in ranks]
    last_of = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in zip(first_of, last_of, strict=True))


def dry_run_text(config: Config) -> str:
    """Resolved configuration, model, layout and processes of a run, as --dry-run prints them.

    Raises:
        UserError: The run could not be started.
    """
    check_before_start(config)
    folder = run_folder(config)
    model = checked_model(config, is_dry=True)
    layout = config.parallel_layout
    lines = ["# resolved configuration", to_toml(config), "# model"]
    lines += [f"{name} = {value}" for name, value in model.items()]
    lines += ["", "# layout", f"{layout.world_size} ranks = tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"]
    lines += _rank_lines(layout, int(str(model["layers"])), int(str(model["experts"])))
    if config.servers.nodes > 1:
        several = f"servers.nodes = {config.servers.nodes}: a server spans several nodes"
        remedy = "`megatron-rl launch CONFIG --dry-run` prints the job with its processes"
        return "\n".join([*lines, "", "# devices", f"this machine cannot start the run: {several}; {remedy}"])
    plan, notes = dry_run_devices(config)
    lines += ["", "# devices", *notes, *plan.lines(), "", "# processes"]
    environment = {"MEGATRON_RL_ORCHESTRATOR": "http://127.0.0.1:PORT", "MEGATRON_RL_KEY": "(generated at start)"}
    host, port = config.servers.host, config.servers.first_port
    key = "(generated at start)"
    commands = [
        server_process(config, folder, plan, slot, host, port + slot, 0, key, has_moe_layers=bool(model["moe_layers"]))
        for slot in range(config.servers.count)
    ]
    commands += [worker_process(folder, plan, environment), *trainer_processes(config, folder, plan, environment, False)]
    for command in commands:
        lines.append(f"{command.name}: {' '.join(f'{k}={v}' for k, v in command.env.items())} {' '.join(command.argv)}")
    return "\n".join(lines)
