"""A rollout server: `python -m megatron_rl.inference.vllm.plugin.serve ARGS`, where ARGS are those of vLLM's API server.

With `--headless` among them it is a further part of a server that spans nodes: workers without an HTTP server, which take their
orders from the head (`server.py`). `vllm serve` knows that option, vLLM's API server does not.

What it adds to `python -m vllm.entrypoints.openai.api_server ARGS`:

- **No process is left over.** When the process that started it exits, the server ends; when the server exits, however that
  happens, so does its engine process (`lifetime.py`).
- **A quick start on a CPU.** vLLM spawns its engine process and that one its worker, and each imports everything again (8 s a
  time). Here the engine process is forked, and with one worker the worker runs inside it: 10 s instead of 30.
- **CPU affinity** from MEGATRON_RL_SERVER_CPUS (such as `0,1`). A worker inside the engine process is not bound by
  VLLM_CPU_OMP_THREADS_BIND, and two servers whose threads spin on the same cores lose nine tenths of their speed.
"""

import ctypes
import os
import runpy
import signal
import sys
from typing import Any

from megatron_rl.inference.vllm.plugin.lifetime import lead_the_server

HEADLESS = "--headless"
CPUS_VARIABLE = "MEGATRON_RL_SERVER_CPUS"
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    """Prepare this process, then run vLLM's API server in it."""
    lead_the_server()
    if cpus := os.environ.get(CPUS_VARIABLE):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _fork_the_engine()
    if HEADLESS in sys.argv:
        _run_workers(sys.argv[1:])
        return
    sys.argv[0] = "api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


def _run_workers(argv: list[str]) -> None:
    """`vllm serve ARGV`, but not by that command: it asks for a distribution named vllm, and the CPU build has another name."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own entry points do
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args([command.name, *argv])
    command.validate(arguments)
    command.cmd(arguments)


def _fork_the_engine() -> None:
    """Have the engine process forked; a single worker runs inside it.

    vLLM has settings for both, and its CPU platform overwrites them; so this comes after it.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        if vllm_config.parallel_config.world_size == 1:
            vllm_config.parallel_config.distributed_executor_backend = "uni"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    _end_forks_with_the_server()


def _end_forks_with_the_server() -> None:
    """The kernel's signal is right here: the engine process is forked from the main thread, which lives as long as the server."""
    libc, forking = ctypes.CDLL(None, use_errno=True), [0]

    def remember() -> None:
        forking[0] = os.getpid()

    def follow() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != forking[0]:  # it died before prctl
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=follow)


if __name__ == "__main__":
    main()
