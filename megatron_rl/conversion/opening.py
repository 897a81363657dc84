"""A model's weights from whichever kind of checkpoint a folder holds."""

from pathlib import Path

from megatron_rl.conversion.hf_reader import HfCheckpoint
from megatron_rl.conversion.megatron_checkpoint import MegatronCheckpoint, is_megatron_checkpoint


def open_checkpoint(folder: str | Path) -> HfCheckpoint | MegatronCheckpoint:
    """A mapping from Hugging Face names to tensors, read as they are touched; both kinds have `config` and `check`."""
    kind = MegatronCheckpoint if is_megatron_checkpoint(Path(folder)) else HfCheckpoint
    return kind.open(folder)
