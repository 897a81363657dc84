"""The command line of one rollout server: argv and environment, as a pure function of what the run wants.

Imports neither torch nor vllm: the orchestrator, which starts the servers, runs without them.
"""

import sys
from collections.abc import Sequence
from typing import Literal

from megatron_rl.wire.access import KEY_VARIABLE

KeepSetSource = Literal["native", "processed_logprobs"]

WEIGHT_TRANSFER_BACKENDS = ("gloo", "nccl")
GIB = 1 << 30


def server_command(
    model_dir: str,
    host: str,
    port: int,
    *,
    device: Literal["cpu", "cuda"],
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    keep_set_source: KeepSetSource,
    max_logprobs: int,
    weight_transfer: str,
    key: str,
    seed: int,
    tensor_parallel_size: int = 1,
    kv_cache_gib: float | None = None,
    gpu_memory_utilization: float | None = None,
    load_format: str = "dummy",
    cpus: Sequence[int] | None = None,
    threads: int = 1,
    extra_arguments: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """argv, and the variables to add to the environment, of one vLLM server.

    model_dir: Hugging Face folder; with load_format "dummy" only its config.json is read, and the first weight update brings the
    weights. key: the run's, without which the server answers nothing but /health; in the environment, where others cannot read it.
    max_logprobs: the most log-probs that a request may ask for; the widest keep-set that `processed_logprobs` can carry.
    seed: must differ between the servers of a run and between the starts of one server: vLLM seeds its sampler with it, so equal
    seeds sample equal tokens. kv_cache_gib: size of the KV cache; None leaves it to gpu_memory_utilization, the share of the
    device's (or the machine's) memory. cpus: the cores that a CPU server may use; needed there when tensor_parallel_size > 1.
    threads: CPU threads of each worker. extra_arguments: appended as they are.
    """
    if weight_transfer not in WEIGHT_TRANSFER_BACKENDS:
        raise ValueError(
            f"weight_transfer is {weight_transfer!r}; a server can be updated by {' or '.join(WEIGHT_TRANSFER_BACKENDS)}"
        )
    if kv_cache_gib is None and gpu_memory_utilization is None:
        raise ValueError("neither kv_cache_gib nor gpu_memory_utilization is given; one of them must bound the server's memory")
    argv = [
        sys.executable, "-m", "megatron_rl.inference.vllm.plugin.serve",
        "--model", model_dir,
        "--host", host,  # vLLM's default is every interface
        "--port", str(port),
        "--dtype", dtype,
        "--load-format", load_format,
        "--seed", str(seed),
        "--max-model-len", str(max_model_len),
        "--max-num-seqs", str(max_num_seqs),
        "--tensor-parallel-size", str(tensor_parallel_size),
        "--max-logprobs", str(max_logprobs),
        "--logprobs-mode", "processed_logprobs",  # of the tempered, truncated distribution: the one sampled from
        "--enable-return-routed-experts",
        "--enable-scale-out",  # /inference/v1/generate: token ids in, token ids out
        "--skip-tokenizer-init",
        "--generation-config", "vllm",  # or the model's generation_config.json would set top_k and penalties behind our back
        "--weight-transfer-config", f'{{"backend": "{weight_transfer}"}}',
        "--disable-uvicorn-access-log",
        "--middleware", "megatron_rl.inference.vllm.plugin.access.RequireKey",
    ]  # fmt: skip
    if kv_cache_gib is not None:
        argv += ["--kv-cache-memory-bytes", str(int(kv_cache_gib * GIB))]
    if gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
    if keep_set_source == "native":
        argv += ["--return-sampling-mask"]
    if device == "cpu":
        argv += ["--enforce-eager", "--worker-cls", "megatron_rl.inference.vllm.plugin.worker.RolloutCpuWorker"]
    # vLLM serves the routes for pausing, weight updates and collective_rpc in this mode only. The model comes from a folder.
    env = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", KEY_VARIABLE: key}
    # Longer than any client keeps an idle connection: a server that closes first may do so as a request arrives (ReadError).
    env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"
    if device == "cpu":
        env |= _cpu_environment(cpus, threads, tensor_parallel_size)
    return argv + list(extra_arguments), env


def _cpu_environment(cpus: Sequence[int] | None, threads: int, tensor_parallel_size: int) -> dict[str, str]:
    """Threads and cores: a lone worker, inside the engine's process, keeps the server's affinity; several are bound by vLLM."""
    env = {"OMP_NUM_THREADS": str(threads)}
    if cpus is not None:
        env["MEGATRON_RL_SERVER_CPUS"] = ",".join(map(str, cpus))
    if tensor_parallel_size == 1:
        return env
    if cpus is None or len(cpus) < tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size} and cpus is {cpus}: on a CPU vLLM binds each worker to cores of its "
            f"own, so a server needs at least {tensor_parallel_size} of them"
        )
    share = len(cpus) // tensor_parallel_size
    shares = [cpus[rank * share : (rank + 1) * share] for rank in range(tensor_parallel_size)]
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in shares)
    return env
