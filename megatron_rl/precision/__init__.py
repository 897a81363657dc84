"""NVFP4: numerics, which weights are quantised, and the formats in which they are sent and stored.

selection = Selection(table, modules=["experts"], exclude=["model.layers.0"])
quantised = quantise(matrix, amax)              # packed bytes, block scales, global scale; amax of all that share it
dequantise(quantised), fake_quantise(matrix, amax)    # the same values, to the last bit
"""

from megatron_rl.precision.checkpoint import FORMATS, CheckpointFormat, format_named, stored_format
from megatron_rl.precision.kernels import MatrixQuantiser, TorchQuantiser, difference_of
from megatron_rl.precision.nvfp4 import (
    BLOCK,
    Nvfp4,
    QuantisationError,
    amax_of,
    dequantise,
    encoding_scale,
    fake_quantise,
    quantise,
)
from megatron_rl.precision.selection import Selection, check_shards, selection_of
from megatron_rl.precision.stream import quantised_stream, wire_format
from megatron_rl.precision.unpacking import Unpacker

__all__ = [
    "BLOCK",
    "FORMATS",
    "CheckpointFormat",
    "MatrixQuantiser",
    "Nvfp4",
    "QuantisationError",
    "Selection",
    "TorchQuantiser",
    "Unpacker",
    "amax_of",
    "check_shards",
    "dequantise",
    "difference_of",
    "encoding_scale",
    "fake_quantise",
    "format_named",
    "quantise",
    "quantised_stream",
    "selection_of",
    "stored_format",
    "wire_format",
]
