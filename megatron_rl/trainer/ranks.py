"""What the ranks of the trainer tell one another beside tensors: small Python objects."""

import os
from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def the_rank() -> int:
    """This process's rank, as torchrun, Slurm and the local launcher say it."""
    return int(os.environ["RANK"])


def share(value: T | None) -> T:
    """Rank 0's value on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: T) -> Sequence[T]:
    """Every rank's value, in the order of ranks, on all of them."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_on_first(value: T) -> Sequence[T] | None:
    """Every rank's value, in the order of ranks, on rank 0; None on the others, which would only carry what they do not need."""
    values: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values
