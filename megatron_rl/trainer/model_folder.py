"""The model of a run as the trainer reads it."""

from pathlib import Path

from megatron_rl.batching import AssemblyOptions
from megatron_rl.config import Config
from megatron_rl.conversion import HfCheckpoint, MegatronCheckpoint, open_checkpoint, table_of
from megatron_rl.engine.engine import Engine


def open_model(folder: Path) -> HfCheckpoint | MegatronCheckpoint:
    """The model's folder, of Hugging Face's format or converted from it, every tensor of it accounted for."""
    checkpoint = open_checkpoint(folder)
    checkpoint.check(table_of(checkpoint))
    return checkpoint


def assembly_options(config: Config, engine: Engine) -> AssemblyOptions:
    """What this rank's microbatches hold."""
    return AssemblyOptions(
        contract=engine.table.architecture.contract,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        sequence_parallel=config.sequence_parallel,
        keep_set_replay=config.objective.keep_set_replay,
        routing_replay=config.objective.routing_replay,
        moe_layers=engine.moe_layers,
    )
