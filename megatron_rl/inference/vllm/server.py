"""The command line of one rollout server: argv and environment, as a pure function of what the run wants.

Imports neither torch nor vllm: the orchestrator, which starts the servers, runs without them.

A server that spans nodes is one vLLM engine whose tensor-parallel workers are on several nodes (vLLM's `--nnodes`, by its
multiprocessing executor, without Ray). The head's scheduler sends every call to all workers and collects their answers, so
pauses, weight updates, routes, keep-sets and version spans are those of a server on one node. Of the two other ways, vLLM refuses
to return routes with pipeline parallelism, and data parallelism makes several engines, whose answers to one call are one
engine's.
"""

import itertools
import math
import sys
from collections.abc import Sequence

from megatron_rl.inference.engine import ServerPart, ServerSettings, WeightTransport
from megatron_rl.inference.errors import UnsupportedByEngineError
from megatron_rl.wire.access import KEY_VARIABLE

WEIGHT_TRANSFER_BACKENDS: tuple[WeightTransport, ...] = ("gloo", "nccl")
"""vLLM's names (`--weight-transfer-config`) for the transports: its own `nccl`, and `gloo`, which `plugin` adds."""

GIB = 1 << 30

ONE_ADDRESS_OF_SEVERAL = (
    "--data-parallel-rank", "-dpn", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe"
)  # fmt: skip
"""vLLM's arguments with which one server is several addresses, each for a part of its data-parallel replicas."""
PLACE_OF_A_PART = (
    "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless", "--distributed-executor-backend"
)  # fmt: skip
"""vLLM's arguments that say which part of which server a process is; `servers.nodes` decides that."""
ADDRESS_AND_MODEL = ("--host", "--port", "--uds", "--model", "--api-key", "--root-path", "--ssl-keyfile", "--ssl-certfile")
"""vLLM's arguments with which the program would not reach the server, or would reach another model."""
WHOLE_EXPERTS = ("--enable-expert-parallel", "-ep")
_PARALLEL_FLAGS = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
    "--data-parallel-size": "data",
    "-dp": "data",
}
"""vLLM's arguments that multiply the GPUs of a server."""


def server_command(settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
    """See `InferenceEngine.server_command`. vLLM seeds its sampler with the seed, so equal seeds sample equal tokens."""
    s = settings
    if s.weight_transport not in WEIGHT_TRANSFER_BACKENDS:
        raise UnsupportedByEngineError(
            f"weight_transport is {s.weight_transport!r}; a vLLM server can be updated by {' or '.join(WEIGHT_TRANSFER_BACKENDS)}"
        )
    if s.kv_cache_gib is None and s.gpu_memory_utilization is None:
        raise UnsupportedByEngineError(
            "neither kv_cache_gib nor gpu_memory_utilization is given; one of them must bound the server's memory"
        )
    _check_extra_arguments(s.extra_arguments, s.device)
    argv = [
        sys.executable, "-m", "megatron_rl.inference.vllm.plugin.serve",
        "--model", s.model_folder,
        "--host", s.host,  # vLLM's default is every interface
        "--port", str(s.port),
        "--dtype", s.dtype,
        "--load-format", s.load_format,
        "--seed", str(s.seed),
        "--max-model-len", str(s.max_sequence_length),
        "--max-num-seqs", str(s.max_num_seqs),
        "--tensor-parallel-size", str(s.tensor_parallel_size),
        "--max-logprobs", str(s.max_keep_set),
        "--logprobs-mode", "processed_logprobs",  # of the tempered, truncated distribution: the one sampled from
        "--enable-scale-out",  # /inference/v1/generate: token ids in, token ids out
        "--skip-tokenizer-init",
        "--generation-config", "vllm",  # or the model's generation_config.json would set top_k and penalties unseen
        "--weight-transfer-config", f'{{"backend": "{s.weight_transport}"}}',
        "--disable-uvicorn-access-log",
        "--middleware", "megatron_rl.inference.vllm.plugin.access.RequireKey",
    ]  # fmt: skip
    if s.kv_cache_gib is not None:
        argv += ["--kv-cache-memory-bytes", str(int(s.kv_cache_gib * GIB))]
    if s.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", str(s.gpu_memory_utilization)]
    if s.has_moe_layers:  # vLLM from 0.32 refuses the flag for a dense model
        argv += ["--enable-return-routed-experts"]
    if s.keep_set_source == "native":
        argv += ["--return-sampling-mask"]
    if s.device == "cpu":
        argv += ["--enforce-eager", "--worker-cls", "megatron_rl.inference.vllm.plugin.worker.RolloutCpuWorker"]
    # vLLM serves the routes for pausing, weight updates and collective_rpc in this mode only. The model comes from a folder.
    env = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", KEY_VARIABLE: s.key}
    # Longer than any client keeps an idle connection: a server that closes first may do so as a request arrives (ReadError).
    env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"
    if s.part is not None:
        devices_per_server(s.tensor_parallel_size, s.extra_arguments, s.part.count)  # refuses what cannot be divided
        argv += _place_of(s.part)
    if s.device == "cpu":
        env |= _cpu_environment(s.cpus, s.threads, s.tensor_parallel_size, s.part)
    return argv + list(s.extra_arguments), env


def _check_extra_arguments(words: Sequence[str], device: str) -> None:
    names = {word: word.partition("=")[0].replace("_", "-") for word in words if word.startswith("-")}
    if split := [word for word, name in names.items() if name in ONE_ADDRESS_OF_SEVERAL]:
        raise UnsupportedByEngineError(
            f"servers.extra_arguments has {', '.join(split)}: then a server's address reaches a part of its replicas only, and "
            "the others would get no weights; let vLLM balance them behind one address (--data-parallel-size alone), or raise "
            "servers.count"
        )
    if placed := [word for word, name in names.items() if name in PLACE_OF_A_PART]:
        raise UnsupportedByEngineError(
            f"servers.extra_arguments has {', '.join(placed)}: the program itself tells each part of a server its place; leave "
            "them out, and set servers.nodes"
        )
    if own := [word for word, name in names.items() if name in ADDRESS_AND_MODEL]:
        raise UnsupportedByEngineError(
            f"servers.extra_arguments has {', '.join(own)}: the program itself says where a server listens and what it serves, "
            "and would not reach it; leave them out, and set servers.host, servers.first_port or model.path"
        )
    if device == "cpu" and (whole := [word for word, name in names.items() if name in WHOLE_EXPERTS]):
        raise UnsupportedByEngineError(
            f"servers.extra_arguments has {', '.join(whole)}: the CPU build's kernel for experts (vLLM 0.30.0) does not know "
            "that some are on other workers, and crashes; leave it out, and each worker has a slice of every expert"
        )


def _place_of(part: ServerPart) -> list[str]:
    place = [
        "--nnodes", str(part.count),
        "--node-rank", str(part.index),
        "--master-addr", part.head_address,
        "--master-port", str(part.head_port),
        "--distributed-executor-backend", "mp",
    ]  # fmt: skip
    return place if part.index == 0 else [*place, "--headless"]


def devices_per_server(tensor_parallel_size: int, extra_arguments: Sequence[str], num_nodes: int = 1) -> int:
    """GPUs of one server: tensor x pipeline x data parallelism (vllm serve --help, ParallelConfig).

    Args:
        tensor_parallel_size: What the command line above gives.
        extra_arguments: The user's, which vLLM reads after it: `--flag value` or `--flag=value`, with - or _ in the name.
        num_nodes: That the server spans.

    Raises:
        UnsupportedByEngineError: A size that is not a positive number, or nodes that the workers cannot be divided over.
    """
    sizes = _parallel_sizes(tensor_parallel_size, extra_arguments)
    num_workers = math.prod(sizes.values())
    if num_nodes > 1 and sizes["data"] > 1:
        raise UnsupportedByEngineError(
            f"servers.nodes = {num_nodes} with {sizes['data']} data-parallel replicas in servers.extra_arguments: a server that "
            "spans nodes is one engine; leave them out, and raise servers.count"
        )
    if num_nodes > 1 and sizes["pipeline"] > 1:
        raise UnsupportedByEngineError(
            f"servers.nodes = {num_nodes} with {sizes['pipeline']} pipeline stages in servers.extra_arguments: vLLM returns no "
            "routes with pipeline parallelism; leave them out, and raise servers.tensor"
        )
    if num_workers % num_nodes:
        raise UnsupportedByEngineError(
            f"the {num_workers} workers of a server (servers.tensor and servers.extra_arguments) cannot be divided evenly over "
            f"servers.nodes = {num_nodes}; change one of them"
        )
    return num_workers


def _parallel_sizes(tensor_parallel_size: int, extra_arguments: Sequence[str]) -> dict[str, int]:
    sizes = {"tensor": tensor_parallel_size, "pipeline": 1, "data": 1}
    words = [part for argument in extra_arguments for part in argument.split("=", 1)]
    for flag, value in itertools.pairwise([*words, ""]):
        kind = _PARALLEL_FLAGS.get(flag if len(flag) <= len("-tp") else flag.replace("_", "-"))
        if kind is None:
            continue
        if not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise UnsupportedByEngineError(
                f"servers.extra_arguments has {flag} {value!r}; a positive number has to follow {flag}"
            )
        sizes[kind] = int(value)
    return sizes


def _cpu_environment(
    cpus: Sequence[int] | None, threads: int, tensor_parallel_size: int, part: ServerPart | None
) -> dict[str, str]:
    """Threads and cores: a lone worker keeps the affinity of the process that was started; several on one node vLLM binds."""
    env = {"OMP_NUM_THREADS": str(threads)}
    if cpus is not None:
        env["MEGATRON_RL_SERVER_CPUS"] = ",".join(map(str, cpus))
    num_workers = tensor_parallel_size // (part.count if part else 1)
    if num_workers == 1:
        return {**env, "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if part else env
    if cpus is None or len(cpus) < num_workers:
        raise UnsupportedByEngineError(
            f"a node has {num_workers} workers of a server (servers.tensor over servers.nodes), and cpus is {cpus}: on a CPU "
            f"vLLM binds each worker to its own cores; give the server at least {num_workers} of them, or one worker a node"
        )
    share = len(cpus) // num_workers
    shares = [cpus[rank * share : (rank + 1) * share] for rank in range(num_workers)]
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in shares)
    return env
