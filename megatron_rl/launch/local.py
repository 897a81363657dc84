"""A run on this machine: everything is checked, started, watched and stopped from one process."""

import asyncio
import json
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.batching import Spool
from megatron_rl.config import Config, ConfigError, RunFolder, run_folder, to_toml
from megatron_rl.launch.observer import RunObserver
from megatron_rl.orchestrator import (
    Orchestrator,
    RunState,
    control_app,
    listen,
    local_fleet,
    server_process,
    serving,
    trainer_processes,
    worker_process,
)  # fmt: skip
from megatron_rl.processes import Child, check_port, dying_with_me, free_ports, stop_all
from megatron_rl.tasks import load_task

GRACE_S = 10.0
"""How long trainer and workers have to leave by themselves at the end."""


def run_locally(config: Config, folder: RunFolder, resume: bool) -> None:
    """Train until the last step, Ctrl-C, or a failure. Raises RunFailed, or ValueError when the run could not be started."""
    check_before_start(config)
    folder.create(config)
    prepare_model(folder.config_file, folder.model)
    Spool(folder.path).create()
    asyncio.run(_run(config, folder, resume))


def check_before_start(config: Config) -> None:
    """What can be known to fail before anything is started: the task, the reward function, the ports."""
    load_task(config.task, config.run.seed)
    for slot in range(config.servers.count if config.servers.first_port else 0):
        check_port(config.servers.host, config.servers.first_port + slot, f"servers.first_port, server {slot}")


def prepare_model(config_file: Path, model: Path | None) -> dict[str, object]:
    """Check the model, and lay it ready in the folder `model` if given; in a process of its own, since this one stays without torch."""
    argv = [sys.executable, "-m", "megatron_rl.launch.prepare", str(config_file), *([str(model)] if model else [])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=dying_with_me())
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"{' '.join(argv)} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


async def _run(config: Config, folder: RunFolder, resume: bool) -> None:
    key = secrets.token_hex(16)
    listener = listen("127.0.0.1")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    environment = {"MEGATRON_RL_ORCHESTRATOR": url, "MEGATRON_RL_KEY": key, "HF_HUB_OFFLINE": "1"}
    state, step = restore(config, folder) if resume else (RunState.new(config), 0)
    with RunObserver(config, folder) as observer:
        observer.event(f"keep-sets: {config.keep_set_source}; weights over {config.transport}; device: {config.device}")
        orchestrator = Orchestrator(config, folder, state, local_fleet(config, folder, key), observer, step)
        children: list[Child] = []
        async with serving(control_app(key, orchestrator.handlers, orchestrator.status), listener):
            try:
                children.append(Child(worker_process(folder, environment)))
                for command in trainer_processes(config, folder, free_ports(1)[0], environment, resume):
                    children.append(Child(command))
                _stop_on_signals(orchestrator, children)
                await orchestrator.run(children)
            finally:
                stop_all(children, GRACE_S)
    observer.summarise()


def restore(config: Config, folder: RunFolder) -> tuple[RunState, int]:
    """State and step of the latest checkpoint; a new state when the run was stopped before its first one."""
    latest = folder.latest_checkpoint()
    if latest is None:
        return RunState.new(config), 0
    step, path = latest
    saved = json.loads((path / "orchestrator.json").read_text())
    return RunState.from_json(config, saved), step


def _stop_on_signals(orchestrator: Orchestrator, children: list[Child]) -> None:
    """The first Ctrl-C stops in order, with a checkpoint; the second one at once."""
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            for child in children:
                child.kill()
            orchestrator.fail("stopped at once, by a second signal; --resume goes on from the last checkpoint")
        asked = True
        orchestrator.observe.event("stopping: the step under way is finished and saved (again: stop at once)")
        orchestrator.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def dry_run_text(config: Config) -> str:
    """What a run would be: resolved configuration, model, layout, processes."""
    check_before_start(config)
    folder = run_folder(config)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.toml"
        file.write_text(to_toml(config))
        model = prepare_model(file, None)
    layout = config.parallel
    lines = ["# resolved configuration", to_toml(config), "# model"]
    lines += [f"{name} = {value}" for name, value in model.items()]
    lines += ["", "# layout", f"{layout.world_size} ranks = tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}"]
    for rank in range(layout.world_size):
        c = layout.coords_of(rank)
        layers = layout.layers_of_stage(int(str(model["layers"])), c.pp)
        experts = layout.experts_of(int(str(model["experts"])), c.ep) if model["experts"] else None
        lines.append(
            f"rank {rank}: tp {c.tp}, cp {c.cp}, dp {c.dp}, pp {c.pp}, ep {c.ep}, layers {layers[0]}..{layers[-1]}"
            + (f", experts {experts.start}..{experts.stop - 1}" if experts else "")
        )
    lines += ["", "# processes"]
    environment = {"MEGATRON_RL_ORCHESTRATOR": "http://127.0.0.1:PORT", "MEGATRON_RL_KEY": "(made at start)"}
    commands = [server_process(config, folder, slot, config.servers.first_port + slot, 0, "(made at start)") for slot in range(config.servers.count)]
    commands += [worker_process(folder, environment), *trainer_processes(config, folder, 0, environment, False)]
    for command in commands:
        lines.append(f"{command.name}: {' '.join(f'{k}={v}' for k, v in command.env.items())} {' '.join(command.argv)}")
    return "\n".join(lines)
