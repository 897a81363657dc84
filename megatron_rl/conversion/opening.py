"""A model's weights from a checkpoint in either format."""

from pathlib import Path

from megatron_rl.conversion.hf_reader import HfCheckpoint
from megatron_rl.conversion.megatron_checkpoint import MegatronCheckpoint, is_megatron_checkpoint
from megatron_rl.weight_mapping import ParameterTable


def open_checkpoint(folder: str | Path) -> HfCheckpoint | MegatronCheckpoint:
    """A mapping from Hugging Face names to tensors, read as they are touched; both formats have `config` and `check`.

    Raises:
        CheckpointError: The folder is not a complete checkpoint.
    """
    return MegatronCheckpoint.open(folder) if is_megatron_checkpoint(Path(folder)) else HfCheckpoint.open(folder)


def table_of(checkpoint: HfCheckpoint | MegatronCheckpoint) -> ParameterTable:
    """The parameters that a checkpoint should hold, including MTP layers if it has any of them."""
    with_mtp = bool(ParameterTable(checkpoint.config).mtp_names & checkpoint.keys())
    return ParameterTable(checkpoint.config, with_mtp=with_mtp)
