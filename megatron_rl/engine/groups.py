"""The start of a trainer process: torch.distributed, Megatron's process groups, seeds, threads and determinism."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.engine import cpu
from megatron_rl.errors import UserError
from megatron_rl.topology import Layout, RankCoords
from megatron_rl.wire.nccl import DETERMINISTIC_NCCL


class NoDeviceError(UserError, RuntimeError):
    """The run computes on GPUs, and this process has none."""


class DeterminismError(UserError, ValueError):
    """The environment contradicts run.deterministic."""


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place, its process groups, and the device of its tensors."""

    layout: Layout
    coords: RankCoords
    device: torch.device
    tp: dist.ProcessGroup
    """Ranks that hold slices of the same dense matrices."""
    pp: dist.ProcessGroup
    """Stages of the same pipeline, in order."""
    cp: dist.ProcessGroup
    """Ranks that hold parts of the same sequences."""
    dp_cp: dist.ProcessGroup
    """Ranks that hold the same dense parameters, and see different tokens."""

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.coords.rank

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes log-probabilities and the loss."""
        return self.coords.pp == self.layout.pp - 1


def start_process(config: Config, rank: int, *, store: dist.Store) -> ParallelGroups:
    """Do everything that has to happen once in a trainer process before a model can be built; a collective.

    Args:
        config: The run's configuration.
        rank: This process's global rank.
        store: Where the ranks find one another.

    Raises:
        DeterminismError: The environment contradicts `run.deterministic`.
        NoDeviceError: `run.device` is a GPU, and this process sees none.
    """
    torch.set_num_threads(config.trainer.threads_per_rank)
    set_determinism(config.run.deterministic)
    device = choose_device(config.device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=config.layout.world_size,
        timeout=timedelta(seconds=config.trainer.collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return build_groups(config.parallel_layout, device, config.trainer.collective_timeout_s, config.run.seed)


def choose_device(kind: Literal["cpu", "cuda"]) -> torch.device:
    """The one GPU that this process sees, or the CPU with the stand-in for CUDA in place, whatever the machine has.

    Args:
        kind: `Config.device`, which alone decides.

    Raises:
        NoDeviceError: "cuda", and this process sees no GPU that torch can use.
    """
    if kind == "cpu":
        cpu.install()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoDeviceError(
            f"run.device is cuda, but torch {torch.__version__} (built for CUDA {torch.version.cuda}) finds no GPU with "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}; `megatron-rl doctor` shows what is missing"
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def set_determinism(deterministic: bool) -> None:
    """Refuse every operation whose result could differ from run to run.

    To call before the first of them and before any model is built.

    Args:
        deterministic: False: allow them.

    Raises:
        DeterminismError: The environment contradicts it.
    """
    if deterministic:
        # Read by cuBLAS, NCCL and Transformer Engine when they start.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        for name, value in DETERMINISTIC_NCCL.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        _check_environment()
    torch.use_deterministic_algorithms(deterministic)


def _check_environment() -> None:
    required = {
        "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
        **{name: (value,) for name, value in DETERMINISTIC_NCCL.items()},
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    }
    wrong = [
        f"{name}={os.environ[name]} (allowed: {', '.join(values)})"
        for name, values in required.items()
        if os.environ[name] not in values
    ]
    if wrong:
        raise DeterminismError(
            "run.deterministic = true, but the environment has " + "; ".join(wrong) + "; unset these variables"
        )


def build_groups(layout: Layout, device: torch.device, timeout_s: float, seed: int) -> ParallelGroups:
    """Megatron's process groups for a layout, and its random states; a collective.

    Args:
        layout: For as many ranks as torch.distributed, which is initialised already, has.
        device: Device of this rank's tensors.
        timeout_s: Timeout of each collective, in seconds.
        seed: Seed of the run.
    """
    # Imported here: the package has to see the stand-in for CUDA, which choose_device puts in place.
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_s / 60,
    )
    for group in filter(None, ps._global_process_group_list):  # 0.19.2 forgets it for one of them
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    coords = layout.coords_of(dist.get_rank())
    found = RankCoords(
        rank=dist.get_rank(),
        tp=ps.get_tensor_model_parallel_rank(),
        cp=ps.get_context_parallel_rank(),
        dp=ps.get_data_parallel_rank(),
        pp=ps.get_pipeline_model_parallel_rank(),
        etp=ps.get_expert_tensor_parallel_rank(),
        ep=ps.get_expert_model_parallel_rank(),
        edp=ps.get_expert_data_parallel_rank(),
    )
    assert found == coords, f"Megatron places rank {coords.rank} at {found}, topology at {coords}"
    _seed(seed)
    return ParallelGroups(
        layout=layout,
        coords=coords,
        device=device,
        tp=ps.get_tensor_model_parallel_group(),
        pp=ps.get_pipeline_model_parallel_group(),
        cp=ps.get_context_parallel_group(),
        dp_cp=ps.get_data_parallel_group(with_context_parallel=True),
    )


@contextmanager
def parallel_layout(layout: Layout, *, timeout_s: float = 600.0, seed: int = 0) -> Iterator[ParallelGroups]:
    """The groups of one layout on the CPU within a block, so that a process can use several, one after the other; a collective.

    Args:
        layout: For as many ranks as torch.distributed has.
        timeout_s: Timeout of each collective, in seconds.
        seed: Seed of Megatron's random states.
    """
    from megatron.core import parallel_state as ps

    groups = build_groups(layout, choose_device("cpu"), timeout_s, seed)
    try:
        yield groups
        dist.barrier()  # a group is closed when all are done with it
    finally:
        _close_groups(ps._global_process_group_list)
        ps.destroy_model_parallel()


def _close_groups(groups: list[dist.ProcessGroup | None]) -> None:
    """Megatron only forgets its groups; torch keeps each of them, with its threads and connections, until it is destroyed."""
    for group in filter(None, groups):
        dist.destroy_process_group(group)


def _seed(seed: int) -> None:
    """Set Megatron's random states. No result depends on them: random weights follow from seed and name; there is no dropout."""
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global state, which other libraries use
    torch.manual_seed(seed)
    tensor_parallel.random.initialize_rng_tracker()
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
