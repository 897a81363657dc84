"""Checkpoints of the trainer, and the export at the end."""

import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.conversion import CarriedLayers, write_hf_checkpoint
from megatron_rl.conversion.hf_reader import read_config
from megatron_rl.engine.engine import Engine

logger = logging.getLogger(__name__)

ENGINE = "engine"


def save_checkpoint(engine: Engine, folder: Path, step: int) -> None:
    """Model, optimizer and step, in a new folder; a collective. What a killed save left there is removed."""
    if engine.groups.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
    dist.barrier()
    engine.save(folder / ENGINE, step)


def load_checkpoint(engine: Engine, folder: Path) -> int:
    """At any layout. Returns the step."""
    return engine.load(folder / ENGINE)


def write_policy(engine: Engine, folder: Path, model: Path) -> None:
    """The policy as a Hugging Face folder, in place of what is there, with the files of `model` and the layers for multi-token prediction that
    the run does not train; a collective, written by rank 0."""
    tensors = engine.hf_tensors()
    if engine.groups.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        dtype = getattr(torch, engine.config.model.dtype)
        own = engine.table.hf_specs(dtype)
        carried = CarriedLayers.of(model, own)
        write_hf_checkpoint(
            folder, carried.behind(tensors), read_config(model), dtype=dtype, specs=own | carried.specs, assets_from=model
        )
        logger.info("the policy is in %s", folder)
    else:
        for _ in tensors:
            pass
    dist.barrier()
