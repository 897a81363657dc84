"""What the processes of a run are started with: pure functions of config and folder, printed by a dry run."""

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.config import Config, RunFolder
from megatron_rl.inference.engine import ServerPart, ServerSettings
from megatron_rl.inference.registry import engine_of
from megatron_rl.orchestrator.devices import server_name
from megatron_rl.processes import Command, DevicePlan
from megatron_rl.wire.nccl import DETERMINISTIC_NCCL

OWN_STOP_SIGNAL = signal.SIGHUP
"""Of workers and ranks. The orchestrator answers the SIGTERM of a cancelled job, and needs workers and ranks to save; the
inference servers, which it does not need for that, answer it themselves. SIGHUP ends a program that has no handler, and
scancel does not send it."""


def server_process(
    config: Config,
    folder: RunFolder,
    plan: DevicePlan,
    slot: int,
    host: str,
    port: int,
    restarts: int,
    key: str,
    *,
    has_moe_layers: bool,
    part: ServerPart | None = None,
) -> Command:
    """One inference server, or one `part` of it, which listens on host:port and sees its own GPUs alone.

    Args:
        config: The run's.
        folder: The run's.
        plan: Which GPUs each process of the run gets.
        slot: Number of the server.
        host: The address that it listens on.
        port: The port that it listens on.
        restarts: How often it was started before. It enters the seed: a restarted server does not sample the same tokens again.
        key: The run's.
        has_moe_layers: Whether the model has layers with experts (`ModelContract.num_moe_layers`).
        part: Of a server that spans nodes, the process that is started.
    """
    s, on_cpu = config.servers, config.device == "cpu"
    settings = ServerSettings(
        model_folder=str(folder.nvfp4_model if config.servers_have_nvfp4_layers else folder.model),
        host=host,
        port=port,
        device=config.device,
        dtype=config.model.dtype,
        max_sequence_length=config.model.max_sequence_length,
        max_num_seqs=s.max_num_seqs,
        keep_set_source=config.keep_set_source if config.sampling.truncates else None,
        has_moe_layers=has_moe_layers,
        max_keep_set=config.rollouts.max_keep_set,
        weight_transport=config.transport,
        key=key,
        seed=config.run.seed + 1000 * slot + restarts,
        tensor_parallel_size=s.tensor,
        part=part,
        kv_cache_gib=s.kv_cache_gib if on_cpu else None,
        gpu_memory_utilization=0.1 if on_cpu else s.gpu_memory_utilization,
        threads=s.threads,
        extra_arguments=s.extra_arguments,
    )
    argv, env = engine_of(config).server_command(settings)
    if config.run.deterministic and config.transport == "nccl":
        env |= DETERMINISTIC_NCCL
    name = server_name(slot, part.index if part else 0)
    return Command(name, argv, folder.logs / f"{name}.log", {**env, **plan.environment(name)})


def worker_process(folder: RunFolder, plan: DevicePlan, environment: Mapping[str, str], number: int = 0) -> Command:
    """One rollout worker, which sees no GPU."""
    name, orchestrator = f"worker-{number}", environment["MEGATRON_RL_ORCHESTRATOR"]
    argv = [sys.executable, "-m", "megatron_rl.rollouts.worker", str(folder.path), "--orchestrator", orchestrator, "--name", name]
    return Command(name, argv, folder.logs / f"{name}.log", {**environment, **plan.environment(name)}, OWN_STOP_SIGNAL)


def trainer_processes(
    config: Config, folder: RunFolder, plan: DevicePlan, environment: Mapping[str, str], resume: bool
) -> list[Command]:
    """All ranks of the trainer."""
    argv = [sys.executable, "-m", "megatron_rl.trainer", str(folder.path), *(["--resume"] if resume else [])]
    return rank_processes("trainer", argv, config, folder.logs, plan, {**gpu_variables(config), **environment})


def gpu_variables(config: Config) -> dict[str, str]:
    """Variables of the GPU libraries that Megatron's ranks need, and the inference servers must not have.

    Those for determinism each rank sets itself (engine.groups).
    """
    if config.device == "cpu":
        return {}
    variables = {
        "TORCH_NCCL_DESYNC_DEBUG": "1"
    }  # when a collective's time is over, torch's log names the ranks that did not come
    if config.layout.tensor > 1 or config.layout.context > 1:
        # One queue: kernels then start in the order of their launches, which Megatron's overlap of communication and products
        # relies on.
        variables |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return variables


def replay_processes(
    config: Config, folder: RunFolder, scratch: RunFolder, plan: DevicePlan, first: int, steps: int
) -> list[Command]:
    """The ranks of a replay: `folder` is the run's, `scratch` holds the configuration of the replay and takes what it writes."""
    argv = [sys.executable, "-m", "megatron_rl.trainer.rerun", str(folder.path), str(scratch.path), str(first), str(steps)]
    return rank_processes("replay", argv, config, scratch.logs, plan, {**gpu_variables(config), "HF_HUB_OFFLINE": "1"})


def rank_processes(
    name: str, argv: Sequence[str], config: Config, logs: Path, plan: DevicePlan, environment: Mapping[str, str]
) -> list[Command]:
    """One process a rank, NAME-RANK, with the GPU that the plan gives it as its only one.

    Where the ranks meet they ask the orchestrator; those of a replay meet in its folder.
    """
    world = config.layout.world_size
    shared = {"OMP_NUM_THREADS": str(config.trainer.threads_per_rank), **environment}
    return [
        Command(
            f"{name}-{rank}",
            argv,
            logs / f"{name}-{rank}.log",
            {**shared, "RANK": str(rank), **plan.environment(f"{name}-{rank}")},
            OWN_STOP_SIGNAL,
        )
        for rank in range(world)
    ]
