"""One rank of a small process group in which something fails."""

import os
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.engine.replay import make_routes
from megatron_rl.trainer.faults import RankFaultError, fail_together
from megatron_rl.wire.stores import join_store, serve_store

WORLD = 3
TIMEOUT_S = 4.0
FOR_EVER_S = 600.0


def reduce_with_others(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(3), group=group)


def sleeps(rank: int, group: dist.ProcessGroup) -> None:
    """Rank 1 does not come to the collective, and would not for minutes."""
    if rank == 1:
        time.sleep(FOR_EVER_S)
    reduce_with_others(group)


def dies(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 2:
        os.kill(os.getpid(), 9)
    reduce_with_others(group)


def first_dies(rank: int, group: dist.ProcessGroup) -> None:
    """The one that serves the store, while nobody is in a collective."""
    if rank == 0:
        os.kill(os.getpid(), 9)
    time.sleep(FOR_EVER_S)


def refuses(rank: int, group: dist.ProcessGroup) -> None:
    """One rank alone finds routes that it cannot follow; the others are in a collective, or compute."""
    if rank == 1:
        routes = np.array([[[0, 1]], [[3, 3]]], dtype=np.uint8)
        make_routes(
            routes,
            np.array([True, True]),
            np.arange(2),
            own=np.arange(2),
            num_layers=1,
            num_experts=4,
            top_k=2,
            device=torch.device("cpu"),
        )
    if rank == 2:
        time.sleep(FOR_EVER_S)
    reduce_with_others(group)


def ends_well(rank: int, group: dist.ProcessGroup) -> None:
    reduce_with_others(group)
    time.sleep(0.3 * rank)


def live(case: str, rank: int, store: dist.Store) -> None:
    """All output of a rank is its last message."""
    with fail_together(store, rank, WORLD):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT_S))
        group = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=TIMEOUT_S))
        reduce_with_others(group)
        globals()[case](rank, group)


def main(case: str, rank: int, connection) -> None:
    """connection: takes the store's port from rank 0, and gives it to the others."""
    torch.set_num_threads(1)
    if rank == 0:
        store = serve_store("127.0.0.1", TIMEOUT_S)
        connection.send(store.port)
    else:
        store = join_store("127.0.0.1", connection.recv(), TIMEOUT_S)
    try:
        live(case, rank, store)
    except RankFaultError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
