"""The model of a run as the trainer reads it."""

from pathlib import Path

from megatron_rl.batching import AssemblyOptions
from megatron_rl.config import Config
from megatron_rl.conversion import HfCheckpoint, MegatronCheckpoint, open_checkpoint, table_of
from megatron_rl.engine.engine import Engine


def open_model(folder: Path) -> HfCheckpoint | MegatronCheckpoint:
    """Open the model's folder, of Hugging Face's format or converted from it, and check every tensor's name and shape.

    Raises:
        TensorMismatchError: A tensor is missing, unknown or of another shape.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.check(table_of(checkpoint))
    return checkpoint


def assembly_options(config: Config, engine: Engine) -> AssemblyOptions:
    """How this rank's microbatches are assembled."""
    return AssemblyOptions(
        contract=engine.table.architecture.contract,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        sequence_parallel=config.sequence_parallel,
        rank_multiple=config.rank_multiple,
        keep_set_replay=config.objective.keep_set_replay,
        routing_replay=config.objective.routing_replay,
        moe_layers=engine.moe_layers,
    )
