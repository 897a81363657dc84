"""A pool of ranks: processes that share one torch.distributed process group over Gloo and run one case after the other."""

import gc
import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self, cast

from megatron_rl.errors import RunError
from megatron_rl.wire.stores import join_store, serve_store

TIMEOUT_S = 240
_HOST = "127.0.0.1"


class CaseFailedError(RunError):
    """A case failed on a rank; the message is the rank's traceback."""


class RankPool:
    """`size` processes on this machine's CPU; `run(case, ...)` calls case(rank, ...) in each, and returns their answers.

    They start with the first case, or with `start`, which does not wait for them; they end with `close`, and with this process.

    Args:
        size: Number of ranks.
        log_file: Where their output goes; None: to this process's.
        forked: Fork the ranks from one process that has imported torch and Megatron-Core, which serves all pools of this
            process: ten seconds of CPU once, and not once a rank. False: each rank is a new Python, whose resident memory is that
            of a rank of a run.
    """

    def __init__(self, size: int, log_file: Path | None = None, *, forked: bool = True) -> None:
        self.size, self._log_file, self._forked = size, log_file, forked
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a case on each rank.

        Args:
            case: A function of a module that the ranks can import; gets the rank, then `args`.
            *args: What the case needs; sent by pickle.

        Returns:
            The answer of each rank, in order.

        Raises:
            CaseFailedError: With the traceback of the first rank that failed. The next case starts new processes.
        """
        self.start()
        for pipe in self._pipes:
            pipe.send((case, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            # Whichever answers: the ranks before one that failed may wait for it for ever.
            answered = cast(list[Connection], wait(waiting, timeout=max(0.0, deadline - time.monotonic())))
            for pipe in answered or list(waiting)[:1]:
                failure, results[waiting[pipe]] = _answer(pipe)
                if failure:
                    # What is left over from the case would disturb the next one.
                    self.close()
                    raise CaseFailedError(f"rank {waiting[pipe]} of {self.size}: {failure}")
        return [results[rank] for rank in range(self.size)]

    def start(self) -> None:
        """Start the processes, if there are none, without waiting for them."""
        if self._processes:
            return
        context: multiprocessing.context.ForkServerContext | multiprocessing.context.SpawnContext
        if self._forked:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["megatron_rl.engine.rank_imports"])
        else:
            context = multiprocessing.get_context("spawn")
        with socket.create_server((_HOST, 0)) as listener:  # bound here, so that no other process can take the port meanwhile
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                rendezvous = listener if rank == 0 else listener.getsockname()[1]
                serving = (rank, self.size, rendezvous, theirs, self._log_file, dict(os.environ))
                process = context.Process(target=_serve, args=serving)
                process.start()
                theirs.close()  # so that the end of a rank is seen as the end of its pipe
                self._processes.append(process)
                self._pipes.append(ours)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer(pipe: Connection) -> tuple[str | None, Any]:
    try:
        return pipe.recv() if pipe.poll() else (f"no answer in {TIMEOUT_S} s", None)
    except EOFError:
        return "its process has exited", None


def _serve(
    rank: int, size: int, rendezvous: socket.socket | int, pipe: Connection, log_file: Path | None, environment: dict[str, str]
) -> None:
    """Run one rank from its start to its exit.

    Args:
        rank: Number of the rank.
        size: Number of ranks.
        rendezvous: The socket at which rank 0 serves the store; its port for the others.
        pipe: Cases come in, answers go out.
        log_file: Where the output goes.
        environment: That of the asking process now. The process that forks this one has the environment of its start.
    """
    if log_file is not None:
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    import torch
    import torch.distributed as dist

    import megatron_rl.engine.rank_imports  # noqa: F401 - a forked rank has it already

    torch.set_num_threads(1)
    if isinstance(rendezvous, socket.socket):
        store = serve_store(_HOST, TIMEOUT_S, rendezvous)
    else:
        store = join_store(_HOST, rendezvous, TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:  # the asking process has closed its end
            return
        answer: tuple[str | None, Any]
        try:
            answer = (None, case(rank, *args))
        except Exception:  # noqa: BLE001 - whatever it is, the asking process has to get it
            answer = (traceback.format_exc(), None)
        gc.collect()  # engines are in reference cycles, and hold process groups that have threads
        pipe.send(answer)


def _leave_with_parent() -> None:
    """A rank in a collective would not see that its pipe has closed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
