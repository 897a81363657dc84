"""How the trainer's ranks find one another, and collectives of small Python objects."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from megatron_rl.processes import interface_of
from megatron_rl.trainer.steering import Steering
from megatron_rl.wire.stores import address_towards, join_store, serve_store

T = TypeVar("T")


def own_rank() -> int:
    """This process's rank, as torchrun, Slurm and the local launcher set it."""
    return int(os.environ["RANK"])


def rendezvous(steering: Steering, timeout_s: float) -> dist.Store:
    """The ranks' store, served by rank 0.

    It listens on the one address by which rank 0 reaches the orchestrator, at a port that is bound before it is published. Gloo
    then listens on the same interface, and no other.

    Args:
        steering: This rank's client of the orchestrator.
        timeout_s: Of the rendezvous, and of every later wait for a key.

    Raises:
        RendezvousTimeoutError: Rank 0 has not published the store's address in time.
    """
    served: list[dist.TCPStore] = []

    def serve(host: str) -> int:
        served.append(serve_store(host, timeout_s))
        return served[0].port

    host, port = steering.rendezvous(own_rank(), serve, timeout_s)
    if interface := interface_of(address_towards(host, port)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return served[0] if served else join_store(host, port, timeout_s)


def rendezvous_in(folder: Path, world_size: int) -> dist.Store:
    """The store of ranks without an orchestrator, such as those of a rerun: all on this machine, as a file in this folder."""
    return dist.FileStore(str(folder / "store"), world_size)


def broadcast_object(value: T | None) -> T:
    """Rank 0's value, on all ranks. What the other ranks pass is ignored."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return cast("T", box[0])


def gather(value: T) -> Sequence[T]:
    """Every rank's value, in the order of ranks, on all of them."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_object(value: T) -> Sequence[T] | None:
    """Every rank's value, in the order of ranks, on rank 0; None on the others, which need not receive them."""
    values: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values
