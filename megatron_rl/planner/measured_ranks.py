"""What the ranks of a measurement run: a few supervised steps of a shrunken model, of which time and memory are measured.

Whatever loads Megatron is imported inside functions, because the process that sends these functions to the ranks has no stand-in
for CUDA.
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
"""Parameters of glibc's mallopt (malloc.h)."""
_SMALLEST_TENSOR = 1 << 16
_LARGEST_TENSOR = 1 << 25
"""Bytes above which malloc maps a tensor's memory by mmap; the second is the largest value that glibc accepts."""
_NEVER = 2**31 - 1
"""Free bytes above which the heap shrinks: it never does, or each step would request its activations from the system again."""
_RESET_PEAK = "5"
"""Value of /proc/PID/clear_refs that resets the peak of resident memory (proc(5))."""


@dataclass(frozen=True)
class RankMeasurement:
    """Time and memory of one rank."""

    step_s: float
    """Seconds of the fastest of a few steps: other work on the machine can only make a step longer."""
    peak_bytes: int
    """Peak of the process's resident memory."""


class RandomWeights(Mapping[str, Tensor]):
    """Random weights by Hugging Face name, created when they are read, so that only the model's copy uses memory."""

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
    """Measures training steps on one rank. All sequences have the same length, so that every microbatch is full.

    Args:
        _rank: The rank.
        config: Configuration of the shrunken model and its layout.
        num_sequences: Sequences of a step.
        prompt_tokens: Tokens of each prompt.
        response_tokens: Tokens of each response.

    Returns:
        The rank's time and memory.
    """
    _own_pages_for_tensors()
    with parallel_layout(config.parallel_layout) as groups:
        hf_config = config.model.architecture or {}
        table = ParameterTable(hf_config)
        engine = build_engine(config, groups, hf_config, RandomWeights(table))
        plan = _plan(table, num_sequences, prompt_tokens, response_tokens)
        microbatches = _microbatches(config, table, plan, groups)
        for step in range(2):  # the first allocates what stays: gradients and communication buffers
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
    """Makes resident memory equal to the memory in use: a freed tensor returns to the system at once and leaves no hole.

    This makes steps slower, so that it is off while they are timed.
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
