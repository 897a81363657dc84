"""What the processes of a run on one machine are started with: pure functions of config and folder, printed by a dry run."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.config import Config, RunFolder
from megatron_rl.processes import Command
from megatron_rl.rollouts.server import server_command


def server_process(config: Config, folder: RunFolder, slot: int, port: int, life: int, key: str) -> Command:
    """One vLLM server. `life` counts its starts, so that a restarted server does not sample the same tokens again."""
    s, on_cpu = config.servers, config.device == "cpu"
    argv, env = server_command(
        str(folder.model), s.host, port,
        device=config.device, dtype=config.model.dtype, max_model_len=config.model.max_sequence_length, max_num_seqs=s.max_num_seqs,
        keep_set_source=config.keep_set_source, max_logprobs=config.rollouts.max_keep_set,
        weight_transfer=config.transport, key=key, seed=config.run.seed + 1000 * slot + life,
        tensor_parallel_size=s.tensor, kv_cache_gib=s.kv_cache_gib if on_cpu else None,
        gpu_memory_utilization=0.1 if on_cpu else s.gpu_memory_utilization, threads=s.threads,
        extra_arguments=s.extra_arguments,
    )  # fmt: skip
    return Command(f"server-{slot}", argv, folder.logs / f"server-{slot}.log", env)


def worker_process(folder: RunFolder, environment: Mapping[str, str]) -> Command:
    argv = [sys.executable, "-m", "megatron_rl.rollouts.worker", str(folder.path), "--orchestrator", environment["MEGATRON_RL_ORCHESTRATOR"]]
    return Command("worker-0", argv, folder.logs / "worker-0.log", environment)


def trainer_processes(config: Config, folder: RunFolder, rendezvous_port: int, environment: Mapping[str, str], resume: bool) -> list[Command]:
    argv = [sys.executable, "-m", "megatron_rl.trainer", str(folder.path), *(["--resume"] if resume else [])]
    return rank_processes("trainer", argv, config, folder.logs, rendezvous_port, environment)


def replay_processes(config: Config, folder: RunFolder, scratch: RunFolder, first: int, steps: int, rendezvous_port: int) -> list[Command]:
    """The ranks of a replay: `folder` is the run's, `scratch` holds the configuration of the replay and takes what it writes."""
    argv = [sys.executable, "-m", "megatron_rl.trainer.replay", str(folder.path), str(scratch.path), str(first), str(steps)]
    return rank_processes("replay", argv, config, scratch.logs, rendezvous_port, {"HF_HUB_OFFLINE": "1"})


def rank_processes(
    name: str, argv: Sequence[str], config: Config, logs: Path, rendezvous_port: int, environment: Mapping[str, str]
) -> list[Command]:
    """One process a rank; ranks find one another by torch's environment variables, as torchrun and Slurm set them too."""
    world = config.layout.world_size
    threads = str(config.trainer.threads_per_rank)
    shared = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous_port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": threads}
    return [
        Command(f"{name}-{rank}", argv, logs / f"{name}-{rank}.log", {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
