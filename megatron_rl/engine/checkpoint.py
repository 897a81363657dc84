"""Model and optimizer on disk, in Megatron's distributed format: written at one layout, read at any other.

Random states are not saved: random weights are initialised before the first step, and training has no dropout.
Megatron stores names and settings as pickled objects next to the tensors. They are read as data: an object that would run code
is refused.

On a GPU Megatron starts helper processes while it saves, and these import the main module again: the program that trains needs
the usual `if __name__ == "__main__"` guard.
"""

import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.engine.optimizers import PolicyOptimizer
from megatron_rl.engine.stored_metadata import MetadataError, read_metadata
from megatron_rl.errors import RunError
from megatron_rl.weight_mapping import ModelArchitecture

_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}
"""The optimizer's state is cut like the model's parameters, under their names, independent of the layout; each layer has its own
keys."""


class EngineCheckpointError(RunError, RuntimeError):
    """A checkpoint that cannot be written there, is incomplete, or is of another model or optimizer."""


def save_checkpoint(
    folder: Path,
    models: Sequence[DistributedDataParallel],
    optimizer: PolicyOptimizer,
    architecture: ModelArchitecture,
    dtype: str,
    step: int,
) -> None:
    """Write into a staging folder, then rename: a folder under its final name is complete. A collective.

    Args:
        folder: Must not exist.
        models: This rank's chunks, wrapped for training.
        optimizer: Theirs.
        architecture: What the model is.
        dtype: Dtype of the model, as in `model.dtype`.
        step: Returned by `load_checkpoint`.

    Raises:
        EngineCheckpointError: The folder exists, or cannot be written.
    """
    staging = folder.with_name(f".{folder.name}.part")
    _on_first_rank(lambda: _make_room(folder, staging))
    state = _sharded_state(models, optimizer, is_loading=False)
    state |= {
        "step": step,
        "architecture": asdict(architecture),
        "dtype": dtype,
        "trained_by": optimizer.name,
    }
    try:
        dist_checkpointing.save(state, str(staging), content_metadata=dict(_CONTENT))
    except CheckpointException as error:  # which is no Exception
        raise EngineCheckpointError(f"{staging} cannot be written: {_first_line(error)}") from error
    _on_first_rank(lambda: _publish(staging, folder))


def load_checkpoint(
    folder: Path,
    models: Sequence[DistributedDataParallel],
    optimizer: PolicyOptimizer,
    architecture: ModelArchitecture,
    dtype: str,
) -> int:
    """Fill model and optimizer; a collective.

    Args:
        folder: From `save_checkpoint`, at this or any other layout.
        models: This rank's chunks, wrapped for training.
        optimizer: Theirs.
        architecture: What the model is.
        dtype: Dtype of the model, as in `model.dtype`.

    Returns:
        The step that it was saved with.

    Raises:
        EngineCheckpointError: The folder is incomplete, damaged, or of another model or optimizer.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise EngineCheckpointError(
            f"{folder} is not a complete checkpoint: it has no metadata.json; use an earlier one, or start a new run"
        )
    with _reading_data_only(folder):
        _check_content(folder, asdict(architecture), dtype, optimizer.name)
        state = dist_checkpointing.load(_sharded_state(models, optimizer, is_loading=True), str(folder))
    for number, model in enumerate(models):
        model.module.load_state_dict(state[f"model{number}"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _sharded_state(
    models: Sequence[DistributedDataParallel], optimizer: PolicyOptimizer, *, is_loading: bool
) -> ShardedStateDict:
    state: ShardedStateDict = {
        f"model{number}": model.module.sharded_state_dict(metadata=dict(_CONTENT)) for number, model in enumerate(models)
    }
    return state | {"optimizer": optimizer.sharded_state_dict(state, _CONTENT, is_loading=is_loading)}


@contextmanager
def _reading_data_only(folder: Path) -> Iterator[None]:
    """Neither `.metadata` nor an object next to the tensors may make more than plain values, wherever the folder comes from.

    What cannot be read is reported with its folder. torch and Megatron read both by pickle, and some objects without
    weights_only.
    """
    try:
        read_metadata(folder / ".metadata")
        with _environment({"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}):
            yield
    except (CheckpointException, CheckpointingException, MetadataError, pickle.UnpicklingError, OSError, EOFError) as error:
        remedy = "use an earlier checkpoint; of a foreign one use only the weights, by megatron-rl convert megatron-to-hf"
        raise EngineCheckpointError(f"{folder} cannot be read: {_first_line(error)}; {remedy}") from error


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """torch reads these at every load."""
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _first_line(error: BaseException) -> str:
    """The first rank's own error, of those that torch has gathered from all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_first_line(cause)}"
    if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error):
        # torch's own message says how to load it anyway
        return "an object next to the tensors is more than data, and is not made"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_content(folder: Path, architecture: dict[str, Any], dtype: str, optimizer: str) -> None:
    found = dist_checkpointing.load_common_state_dict(str(folder))
    saved = {**found.get("architecture", {}), "dtype": found.get("dtype")}
    wanted = {**architecture, "dtype": dtype}
    wrong = [
        f"{name} is {saved.get(name)} there and {value} in this run" for name, value in wanted.items() if saved.get(name) != value
    ]
    if wrong:
        raise EngineCheckpointError(f"{folder} is of another model: " + "; ".join(wrong))
    trained_by = found.get("trained_by", "adamw")  # checkpoints from before Muon do not record it
    if trained_by != optimizer:
        raise EngineCheckpointError(
            f"{folder} holds the state of optimizer.name = '{trained_by}', which '{optimizer}' cannot continue; keep the "
            "optimizer, or start a new run from the weights: megatron-rl convert megatron-to-hf, then model.path = that folder"
        )


def _make_room(folder: Path, staging: Path) -> None:
    if folder.exists():
        raise EngineCheckpointError(
            f"{folder} exists already; a checkpoint is never overwritten: remove it, or use another folder"
        )
    shutil.rmtree(staging, ignore_errors=True)  # what an earlier attempt left
    staging.mkdir(parents=True, mode=0o700)


def _publish(staging: Path, folder: Path) -> None:
    staging.replace(folder)
    directory = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name itself is on disk
    finally:
        os.close(directory)


def _on_first_rank(work: Callable[[], None]) -> None:
    """Run `work` on rank 0 while the others wait; its error is raised on all of them, so that none waits forever."""
    problem: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except (OSError, EngineCheckpointError) as error:
            problem[0] = error
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]
