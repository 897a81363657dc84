"""Checkpoints of the trainer, and the export at the end."""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from megatron_rl.config import RunFolder
from megatron_rl.config.sections import LayoutSection
from megatron_rl.conversion import CarriedLayers, write_hf_checkpoint
from megatron_rl.conversion.hf_reader import read_config
from megatron_rl.engine.checkpoint import EngineCheckpointError
from megatron_rl.engine.engine import Engine
from megatron_rl.trainer.fingerprint import Fingerprint, checksums
from megatron_rl.trainer.ranks import broadcast_object, gather_object

logger = logging.getLogger(__name__)

ENGINE = "engine"


def save_checkpoint(engine: Engine, folder: Path, step: int) -> None:
    """Write model, optimizer and step; a collective.

    Args:
        engine: What is saved.
        folder: Made anew: what an interrupted save left there is removed.
        step: Number of completed steps.
    """
    if engine.groups.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
    dist.barrier()
    engine.save(folder / ENGINE, step)


def load_checkpoint(engine: Engine, folder: Path) -> int:
    """Load model and optimizer, saved at any layout; a collective. Returns the number of completed steps."""
    return engine.load(folder / ENGINE)


def check_loaded(engine: Engine, checkpoint: Path, fingerprints: Path, step: int, layout: LayoutSection) -> None:
    """Compare the state just loaded with the checksums recorded when it was saved; a collective.

    Nothing else detects a byte that a disk has changed. Nothing is compared where no fingerprint was recorded at this layout.

    Args:
        engine: With the checkpoint loaded.
        checkpoint: Named in the message.
        fingerprints: The run's folder of fingerprints.
        step: Number of completed steps: the checkpoint was saved after step - 1.
        layout: This run's layout section: at another one the ranks hold other parts.

    Raises:
        EngineCheckpointError: On rank 0, which ends all ranks.
    """
    recorded = Fingerprint.read(fingerprints, step - 1)
    own = gather_object(checksums(engine.state())) if broadcast_object(recorded is not None) else None
    if own is None or recorded is None or recorded.layout != layout.model_dump():
        return
    if found := recorded.first_difference(Fingerprint(step - 1, recorded.layout, tuple(own))):
        raise EngineCheckpointError(
            f"{checkpoint}: {found.name} of rank {found.rank} and {found.num_different - 1} more tensors are not what was saved; "
            "remove the folder: --resume then continues from the checkpoint before it"
        )


def write_policy(engine: Engine, folder: Path, run: RunFolder) -> None:
    """Write the policy as a Hugging Face folder; a collective, in which rank 0 writes.

    Args:
        engine: Holds the policy.
        folder: Replaced where it exists.
        run: Its model's other files are copied, and its layers for multi-token prediction where the run does not train them.
    """
    tensors = engine.hf_tensors()
    if engine.groups.rank == 0:
        on_rank_0 = cast("Iterable[tuple[str, torch.Tensor]]", tensors)  # the other ranks get (name, None)
        shutil.rmtree(folder, ignore_errors=True)
        dtype = getattr(torch, engine.config.model.dtype)
        own = engine.table.hf_specs(dtype)
        carried, model = CarriedLayers.of(run.weights, own), run.model
        write_hf_checkpoint(
            folder, carried.appended_to(on_rank_0), read_config(model), dtype=dtype, specs=own | carried.specs, assets_from=model
        )
        logger.info("the policy is in %s", folder)
    else:
        for _ in tensors:
            pass
    dist.barrier()
