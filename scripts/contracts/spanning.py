"""A server that spans nodes, by vLLM's own functions: which worker each process of it starts, and what a headless part does."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron_rl.inference.engine import ServerSettings
from megatron_rl.inference.vllm.server import server_command

from .program import SPANNING, SPANNING_GPUS, spanning_settings
from .source import ChangedSourceError, definition, execute

_PROPERTIES = ("nnodes_within_dp", "node_rank_within_dp", "local_world_size", "get_local_gpu_index")

_NUMBERS = ("nnodes", "node_rank", "tensor_parallel_size", "master_port")
_WORDS = ("master_addr", "distributed_executor_backend")


def spanning_facts(root: Path) -> dict[str, Any]:
    """Each node's workers as [rank in the server, GPU of the node, rank in the weight group]; what a headless part calls."""
    v = root / "vllm"
    return {"workers": [_workers_of(v, settings) for settings in spanning_settings()], "headless": _headless_calls(v)}


def what_is_not_right(facts: dict[str, Any]) -> list[str]:
    """What differs from one worker on each GPU, and one member of the weight group for each worker."""
    per_node = SPANNING_GPUS // SPANNING.count
    expected = [[[n * per_node + i, i, 1 + n * per_node + i] for i in range(per_node)] for n in range(SPANNING.count)]
    problems = (
        [] if facts["workers"] == expected else [f"a server over {SPANNING.count} nodes has the workers {facts['workers']}"]
    )
    calls = ["run_headless", "MultiprocExecutor(monitor_workers=False)", "start_worker_monitor(inline=True)"]
    return problems + ([] if facts["headless"] == calls else [f"a headless part of a server does {facts['headless']}"])


def _parallel_config(v: Path, settings: ServerSettings) -> Any:
    """vLLM's own, as much of it as these properties need, filled by the program's command line."""
    code = execute(v / "config" / "parallel.py", [f"ParallelConfig.{name}" for name in _PROPERTIES], {})
    config = type("ParallelConfig", (), {name: getattr(code, name) for name in _PROPERTIES})()
    argv, _ = server_command(settings)
    given = {name: argv[argv.index(f"--{name.replace('_', '-')}") + 1] for name in _NUMBERS + _WORDS}
    vars(config).update(given | {name: int(given[name]) for name in _NUMBERS})
    vars(config).update(
        data_parallel_size=1, data_parallel_size_local=1, data_parallel_rank_local=0, data_parallel_index=0,
        data_parallel_external_lb=False, data_parallel_backend="mp", world_size=config.tensor_parallel_size,
    )  # fmt: skip
    return config


def _workers_of(v: Path, settings: ServerSettings) -> list[list[int]]:
    config = _parallel_config(v, settings)
    executor = v / "v1" / "executor" / "multiproc_executor.py"
    if "self.local_world_size * self.parallel_config.node_rank_within_dp" not in executor.read_text():
        raise ChangedSourceError(f"{executor} numbers the workers of a node in another way; change {__file__}")
    member = execute(v / "distributed" / "weight_transfer" / "nccl_common.py", ["_worker_group_rank"], {})._worker_group_rank
    workers = []
    for local_rank in range(config.local_world_size):
        config.rank = config.local_world_size * config.node_rank_within_dp + local_rank
        workers.append([config.rank, config.get_local_gpu_index(local_rank), member(1, config)])
    return workers


def _headless_calls(v: Path) -> list[str]:
    """What `vllm serve --headless` does on a further node of a server; inference/vllm/plugin/serve.py calls it by these names."""
    file = v / "entrypoints" / "cli" / "serve.py"
    for name in ("subparser_init", "validate", "cmd"):
        definition(file, f"ServeSubcommand.{name}")
    calls: list[str] = []

    class Executor:
        def __init__(self, config: object, monitor_workers: bool) -> None:
            calls.append(f"MultiprocExecutor(monitor_workers={monitor_workers})")

        def start_worker_monitor(self, inline: bool) -> None:
            calls.append(f"start_worker_monitor(inline={inline})")

    *_, last = spanning_settings()
    config = SimpleNamespace(parallel_config=_parallel_config(v, last))
    engine_arguments = SimpleNamespace(create_engine_config=lambda **given: config, data_parallel_hybrid_lb=False)
    library = SimpleNamespace(AsyncEngineArgs=SimpleNamespace(from_cli_args=lambda arguments: engine_arguments))
    signals = SimpleNamespace(signal=lambda *given: None, SIGTERM=15, SIGINT=2)
    given = {
        "vllm": library, "MultiprocExecutor": Executor, "signal": signals, "logger": SimpleNamespace(info=lambda *words: None),
        "UsageContext": SimpleNamespace(OPENAI_API_SERVER="server"), "propagate_flash_late_interaction": lambda *words: None,
        "envs": SimpleNamespace(VLLM_USE_RUST_FRONTEND=False), "argparse": SimpleNamespace(Namespace=object),
    }  # fmt: skip
    code = execute(file, ["ServeSubcommand.cmd", "run_headless"], given)
    arguments = SimpleNamespace(
        headless=True, api_server_count=None, reasoning_parser_plugin="", data_parallel_rank=None,
        data_parallel_external_lb=False,
        data_parallel_hybrid_lb=False, data_parallel_multi_port_external_lb=False, data_parallel_start_rank=None,
    )  # fmt: skip
    version = ModuleType("vllm.version")
    version.__version__ = ""  # type: ignore[attr-defined]

    def run_headless(arguments: object) -> None:
        calls.append("run_headless")
        code.run_headless(arguments)

    command = execute(file, ["ServeSubcommand.cmd"], given | {"run_headless": run_headless}).cmd
    with patch.dict(sys.modules, {"vllm": ModuleType("vllm"), "vllm.version": version}):
        command(arguments)
    return calls
