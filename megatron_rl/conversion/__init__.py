"""Hugging Face checkpoints in and out, streaming: names and shapes come from the weight mapping, bytes from safetensors files.

hf_to_megatron(hf_folder, out)                              # a dist-checkpoint that any layout loads; megatron_to_hf goes back
checkpoint = open_checkpoint(folder)                        # either format, as a mapping from Hugging Face names to tensors

checkpoint = HfCheckpoint.open(folder)
checkpoint.check(table)                                     # every name accounted for, before any work
write_hf_checkpoint(out, tensors, config, dtype=torch.bfloat16, assets_from=folder)   # export, e.g. of engine.hf_tensors()
"""

from megatron_rl.conversion.carried import CarriedLayers
from megatron_rl.conversion.convert import hf_to_megatron, megatron_to_hf
from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.hf_reader import HfCheckpoint
from megatron_rl.conversion.hf_writer import HfCheckpointWriter, write_hf_checkpoint
from megatron_rl.conversion.megatron_checkpoint import MegatronCheckpoint
from megatron_rl.conversion.opening import open_checkpoint, table_of
from megatron_rl.conversion.outgoing import QuantisedAs
from megatron_rl.conversion.random_model import make_random_model, random_hf_tensors
from megatron_rl.conversion.streams import hf_tensors

__all__ = [
    "CarriedLayers",
    "CheckpointError",
    "HfCheckpoint",
    "HfCheckpointWriter",
    "MegatronCheckpoint",
    "QuantisedAs",
    "hf_tensors",
    "hf_to_megatron",
    "make_random_model",
    "megatron_to_hf",
    "open_checkpoint",
    "random_hf_tensors",
    "table_of",
    "write_hf_checkpoint",
]
