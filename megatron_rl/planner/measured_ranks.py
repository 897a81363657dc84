"""What the ranks of a measurement run: a few supervised steps of a shrunken model, and how long and how large they were.

Whatever loads Megatron is imported inside functions: the asking process names these functions, and has no stand-in for CUDA.
"""

import ctypes
import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batching import AssemblyOptions, Microbatch
from megatron_rl.batching.assemble import supervised_microbatches
from megatron_rl.batching.supervised import SupervisedExample, SupervisedPlan
from megatron_rl.config import Config
from megatron_rl.engine import build_engine
from megatron_rl.engine.groups import ParallelGroups, parallel_layout
from megatron_rl.objective import Denominators, SupervisedLoss
from megatron_rl.records import ModelContract
from megatron_rl.weight_mapping import ParameterTable

WARM_UP, STEPS = 1, 4
_WEIGHT_STD = 0.02
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
"""glibc's numbers of the settings (malloc.h)."""
_SMALLEST_TENSOR = 1 << 16
_LARGEST_TENSOR = 1 << 25
"""Bytes from which a tensor has pages of its own; the second is the largest that glibc takes."""
_NEVER = 2**31 - 1
"""Free bytes from which the heap shrinks. Otherwise a step's activations would be taken from the system anew in each step."""
_RESET_PEAK = "5"
"""Of /proc/PID/clear_refs (proc(5))."""


@dataclass(frozen=True)
class RankMeasurement:
    """Of one rank."""

    step_s: float
    """The fastest of a few steps: what others do on the machine only adds to a step."""
    peak_bytes: int
    """Resident memory of the process at its fullest moment."""


class RandomWeights(Mapping[str, Tensor]):
    """Made when they are asked for, so that the model's own memory is all that there is of it."""

    def __init__(self, table: ParameterTable) -> None:
        self._shapes = table.hf_shapes

    def __getitem__(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(len(name))
        shape = self._shapes[name]
        return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * _WEIGHT_STD

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def measure(_rank: int, config: Config, num_sequences: int, prompt_tokens: int, response_tokens: int) -> RankMeasurement:
    """Sequences are all of one length, so that every microbatch is full."""
    _own_pages_for_tensors()
    with parallel_layout(config.parallel_layout) as groups:
        hf_config = config.model.architecture or {}
        table = ParameterTable(hf_config)
        engine = build_engine(config, groups, hf_config, RandomWeights(table))
        plan = _plan(table, num_sequences, prompt_tokens, response_tokens)
        microbatches = _microbatches(config, table, plan, groups)
        for step in range(2):  # the first makes what stays, gradients and buffers of communication
            _forget_peak()
            engine.train_step(microbatches, SupervisedLoss(), Denominators.of(plan), step=step, learning_rate=1e-5)
        peak, seconds = _peak_bytes(), []
        _reused_pages_for_tensors()
        for step in range(WARM_UP + STEPS):
            dist.barrier()
            began = time.perf_counter()
            engine.train_step(microbatches, SupervisedLoss(), Denominators.of(plan), step=step, learning_rate=1e-5)
            seconds.append(time.perf_counter() - began)
        engine.close()
        gc.collect()
        return RankMeasurement(min(seconds[WARM_UP:]), peak)


def _plan(table: ParameterTable, num_sequences: int, prompt_tokens: int, response_tokens: int) -> SupervisedPlan:
    random = np.random.default_rng(0)
    ids = random.integers(0, table.architecture.vocab_size, (num_sequences, prompt_tokens + response_tokens)).tolist()
    return SupervisedPlan(0, tuple(SupervisedExample(tuple(row[:prompt_tokens]), tuple(row[prompt_tokens:])) for row in ids))


def _microbatches(config: Config, table: ParameterTable, plan: SupervisedPlan, groups: ParallelGroups) -> list[Microbatch]:
    options = AssemblyOptions(
        ModelContract(table.architecture.vocab_size, (), 0, 0), config.trainer.max_tokens_per_microbatch, config.sequence_parallel
    )
    return supervised_microbatches(plan, groups.layout, groups.coords, options)


def _own_pages_for_tensors() -> None:
    """From here on resident memory is what is in use.

    A freed tensor goes back to the system at once, and leaves no hole that it cannot go back from. It costs time, so that steps
    are timed without.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _SMALLEST_TENSOR)


def _reused_pages_for_tensors() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_TENSOR)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
