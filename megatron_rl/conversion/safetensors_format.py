"""The part of the safetensors file format that streaming needs: reading and writing headers with offsets.

A file is the length of the header (8 bytes, little endian), the header (JSON: for each tensor dtype, shape and the range of
its bytes, counted from the end of the header), and the bytes. Format: https://github.com/huggingface/safetensors
"""

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.stored import StoredTensor
from megatron_rl.errors import lfs_pointer
from megatron_rl.wire.tensor_spec import DTYPE_BYTES, TensorSpec

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        CheckpointError: The file is truncated or is not a safetensors file.
    """
    if pointer := lfs_pointer(file):
        raise CheckpointError(pointer)
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{file}: not a safetensors file, or truncated: its header would have {length} of {size} bytes")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file}: not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _stored(file, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(file: Path, name: str, entry: Mapping, base: int, size: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {entry['dtype']}; supported are {', '.join(_DTYPES)}")
    spec = TensorSpec(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    start, end = (base + offset for offset in entry["data_offsets"])
    if end > size or end - start != spec.num_bytes:
        raise CheckpointError(
            f"{file}: {name} should be bytes {start} to {end} ({spec.num_bytes} for its shape), but the file has {size} bytes; "
            "fetch the file again"
        )
    return StoredTensor(file, spec, start)


def plan_file(file: Path, specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, StoredTensor]]:
    """Header of a file that will hold `specs`, and the place of each tensor in it."""
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    order = sorted(specs, key=lambda name: -DTYPE_BYTES[specs[name].dtype])
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        spec, end = specs[name], offset + specs[name].num_bytes
        header[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    base = 8 + len(text)
    places = {name: StoredTensor(file, specs[name], base + header[name]["data_offsets"][0]) for name in order}
    return len(text).to_bytes(8, "little") + text, places
