"""Processes that share one torch.distributed world and run one case after the other, so that a hundred cases cost one start."""

import gc
import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 240


class CaseFailed(Exception):
    """A rank's traceback."""


class World:
    """`size` processes; `run(case, ...)` calls case(rank, ...) in each, and returns what they return, by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            failure, result = pipe.recv() if pipe.poll(TIMEOUT_S) else (f"no answer in {TIMEOUT_S} s", None)
            if failure:
                # The others may wait for this rank for ever, and what it left behind would disturb the next case.
                self.close()
                raise CaseFailed(f"rank {rank} of {self.size}: {failure}")
            results.append(result)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, rendezvous, theirs), daemon=False)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from megatron_rl.engine.groups import choose_device

    torch.set_num_threads(1)
    choose_device()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            answer = (None, case(rank, *args))
        except Exception:  # noqa: BLE001 - whatever it is, the tests are told
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
        gc.collect()  # engines lie in cycles, and hold process groups with threads of their own
