"""A model's weights from whichever kind of checkpoint a folder holds."""

from pathlib import Path

from megatron_rl.conversion.hf_reader import HfCheckpoint
from megatron_rl.conversion.megatron_checkpoint import MegatronCheckpoint, is_megatron_checkpoint
from megatron_rl.weight_mapping import ParameterTable


def open_checkpoint(folder: str | Path) -> HfCheckpoint | MegatronCheckpoint:
    """A mapping from Hugging Face names to tensors, read as they are touched; both kinds have `config` and `check`."""
    kind = MegatronCheckpoint if is_megatron_checkpoint(Path(folder)) else HfCheckpoint
    return kind.open(folder)


def table_of(checkpoint: HfCheckpoint | MegatronCheckpoint) -> ParameterTable:
    """What it should hold, with the layers for multi-token prediction if it has any of them."""
    with_mtp = bool(ParameterTable(checkpoint.config).mtp_names & checkpoint.keys())
    return ParameterTable(checkpoint.config, with_mtp=with_mtp)
