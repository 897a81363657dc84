"""How each Megatron parameter maps to Hugging Face tensors: declared once per model family.

    table = ParameterTable(hf_config, padded_vocab_size=layout.padded_vocab_size(hf_config["vocab_size"]))
    placement = Placement(table, layout)
    for (chunk, name), held in placement.held_by(rank).items():    # a rank's parameters, by Megatron's local names
        shard = held.shard_from_hf(hf_tensors)
    full = parameter.unshard(shards)                               # shards of placement.owners(parameter), in that order
    for hf_name, tensor in parameter.to_hf(full): ...

Conversion, weight sync, Muon and NVFP4 read this table; none of them has its own list of names.
"""

from megatron_rl.weight_mapping.architecture import (
    GroupedQueryAttention,
    LatentAttention,
    MixtureOfExperts,
    ModelArchitecture,
    Rope,
    Yarn,
)
from megatron_rl.weight_mapping.assembly import Assembly, names_completed_by
from megatron_rl.weight_mapping.errors import TensorMismatchError, UnknownFamilyError, UnsupportedArchitectureError
from megatron_rl.weight_mapping.family import Family
from megatron_rl.weight_mapping.naming import CHECKPOINT, LOCAL, TRANSFORMER_ENGINE, NamingScheme
from megatron_rl.weight_mapping.parameter import HfSlot, Parameter, Region, Role
from megatron_rl.weight_mapping.placement import HeldParameter, Placement
from megatron_rl.weight_mapping.table import FAMILIES, ParameterTable, family_of

__all__ = [
    "CHECKPOINT",
    "FAMILIES",
    "LOCAL",
    "TRANSFORMER_ENGINE",
    "Assembly",
    "Family",
    "GroupedQueryAttention",
    "HeldParameter",
    "HfSlot",
    "LatentAttention",
    "MixtureOfExperts",
    "ModelArchitecture",
    "NamingScheme",
    "Parameter",
    "ParameterTable",
    "Placement",
    "Region",
    "Role",
    "Rope",
    "TensorMismatchError",
    "UnknownFamilyError",
    "UnsupportedArchitectureError",
    "Yarn",
    "family_of",
    "names_completed_by",
]
