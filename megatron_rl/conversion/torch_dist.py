"""The torch_dist format of Megatron's dist-checkpoints, tensor by tensor: no model is built and no process group is needed.

A folder holds `.metadata` (a pickle of torch.distributed.checkpoint's Metadata: for each key the global shape and the chunks, for
each chunk its file and range of bytes), files `__0_0.distcp`, ... in which each chunk is one archive as torch.save writes it,
common.pt (everything that is not a tensor), and metadata.json, which is written last.
"""

import io
import json
import os
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config as serialization

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.stored import map_bytes, tensor_in
from megatron_rl.engine.stored_metadata import MetadataError, read_metadata
from megatron_rl.wire.tensor_spec import TensorSpec, dtype_name

SEAL = "metadata.json"
"""Written last: a folder without it is incomplete."""
_METADATA, _COMMON = ".metadata", "common.pt"
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_ALIGNMENT = 64


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, and the archive that holds it."""

    key: str
    """Key of the global tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the global tensor."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    start: int
    """First byte of the archive in the file."""
    length: int
    """Bytes of the archive."""

    def map(self) -> Tensor:
        """The chunk's values, mapped from the file."""
        spec = TensorSpec(self.key, self.shape, dtype_name(self.dtype))
        pages, _ = map_bytes(self.file, self.start, self.length)
        # zipfile finds the archive after whatever precedes it in the mapping.
        with zipfile.ZipFile(pages) as archive:  # type: ignore[call-overload]  # a mapping reads, seeks and tells
            data = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        if len(data) != 1 or data[0].file_size != spec.num_bytes or data[0].compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{self.file}: the archive at byte {self.start} does not hold one {spec.dtype} tensor of shape "
                f"{list(spec.shape)} ({self.key}); the file is damaged, copy it again"
            )
        # Local header: 30 bytes, the last four of which are the lengths of the name and of the extra field after it.
        header = data[0].header_offset
        name_bytes, extra_bytes = (int.from_bytes(pages[at : at + 2], "little") for at in (header + 26, header + 28))
        return tensor_in(pages, header + 30 + name_bytes + extra_bytes, spec)


@dataclass(frozen=True)
class StoredArray:
    """A global tensor in chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, index: Sequence[int] = ()) -> Tensor:
        """The tensor at `index` of the leading dimensions.

        Returns:
            A memory-mapped tensor where one chunk holds all of it; otherwise a new one, assembled from the chunks.

        Raises:
            CheckpointError: The chunks do not cover it exactly once.
        """
        first, shape = len(index), self.shape[len(index) :]
        inside = [chunk for chunk in self.chunks if _holds(chunk, index)]
        if len(inside) == 1 and inside[0].shape[first:] == shape:
            return _at(inside[0], index)
        full = torch.empty(shape, dtype=self.dtype)
        for chunk in inside:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets[first:], chunk.shape[first:], strict=True))
            full[box] = _at(chunk, index)
        if sum(torch.Size(chunk.shape[first:]).numel() for chunk in inside) != full.numel():
            raise CheckpointError(
                f"the chunks of a tensor of shape {list(self.shape)} do not cover it exactly once; the checkpoint is damaged"
            )
        return full


def _holds(chunk: Chunk, index: Sequence[int]) -> bool:
    return all(o <= i < o + n for i, o, n in zip(index, chunk.offsets, chunk.shape, strict=False))


def _at(chunk: Chunk, index: Sequence[int]) -> Tensor:
    values = chunk.map()
    for number, offset in zip(index, chunk.offsets, strict=False):
        values = values[number - offset]
    return values


def read_torch_dist(folder: Path) -> dict[str, StoredArray]:
    """All tensors of a folder by key.

    Raises:
        CheckpointError: The folder is incomplete or in another format.
    """
    if not (folder / SEAL).is_file():
        raise CheckpointError(f"{folder} is not a complete Megatron checkpoint: it has no {SEAL}")
    try:
        backend = json.loads((folder / SEAL).read_text()).get("sharded_backend")
    except ValueError as error:
        raise CheckpointError(f"{folder / SEAL}: not valid JSON ({error})") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} has format {backend!r}; only torch_dist can be read")
    try:
        metadata = read_metadata(folder / _METADATA)
    except MetadataError as error:
        raise CheckpointError(str(error)) from error
    found: dict[str, StoredArray] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[key] = StoredArray(tuple(entry.size), entry.properties.dtype, tuple(_chunks(folder, key, entry, metadata)))
    return found


def _chunks(folder: Path, key: str, entry: TensorStorageMetadata, metadata: Metadata) -> Iterable[Chunk]:
    for chunk in entry.chunks:
        place = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            raise CheckpointError(
                f"{folder}: the metadata do not say where the chunk of {key} at {list(chunk.offsets)} is stored"
            )
        if place.transform_descriptors:
            raise CheckpointError(f"{folder}: {key} is stored through {place.transform_descriptors}, which cannot be read")
        file, dtype = folder / place.relative_path, entry.properties.dtype
        yield Chunk(key, tuple(chunk.offsets), tuple(chunk.sizes), dtype, file, place.offset, place.length)


@dataclass(frozen=True)
class Written:
    """An archive in a file: of a chunk, or (dtype None) of a small object. Plain values, which a journal can keep."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str | None
    start: int
    length: int


class ArchiveFile:
    """One `.distcp` file, to which archives are appended."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.written: list[Written] = []

    def add(self, key: str, offsets: Sequence[int], tensor: Tensor) -> None:
        """Append one chunk.

        Args:
            key: Key of the global tensor.
            offsets: Where the chunk begins in the global tensor.
            tensor: Its values.
        """
        self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT))  # so that the values can be memory-mapped
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # torch.save writes all of a view's storage
        start = self._stream.tell()
        with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]  # no reader checks it
            torch.save(tensor, self._stream)
        dtype = dtype_name(tensor.dtype)
        self.written.append(Written(key, tuple(offsets), tuple(tensor.shape), dtype, start, self._stream.tell() - start))

    def add_empty_objects(self, keys: Iterable[str]) -> None:
        """Append the extra state of Transformer Engine's modules: here all of them are empty."""
        archive = io.BytesIO()
        torch.save([None], archive)
        for key in keys:
            self.written.append(Written(key, (), (), None, self._stream.tell(), len(archive.getvalue())))
            self._stream.write(archive.getvalue())


def write_metadata(
    folder: Path, files: dict[str, list[Written]], shapes: dict[str, tuple[int, ...]], common: dict[str, Any]
) -> None:
    """Complete a folder.

    Args:
        folder: Holds the files.
        files: What each file holds, by its name.
        shapes: Global shape of each tensor, by its key.
        common: Everything that is not a tensor.
    """
    storage: dict[MetadataIndex, _StorageInfo] = {}
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for file, written in files.items():
        for item in written:
            if item.dtype is None:
                entries[item.key] = BytesStorageMetadata()
                storage[MetadataIndex(item.key)] = _StorageInfo(file, item.start, item.length)
                continue
            chunk = ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))
            chunks[item.key].append(chunk)
            properties = TensorProperties(dtype=getattr(torch, item.dtype))
            entries[item.key] = TensorStorageMetadata(properties, torch.Size(shapes[item.key]), chunks[item.key])
            storage[MetadataIndex(item.key, chunk.offsets)] = _StorageInfo(file, item.start, item.length)
    _write(folder / _METADATA, pickle.dumps(Metadata(entries, storage_data=storage)))
    archive = io.BytesIO()
    torch.save(common, archive)
    _write(folder / _COMMON, archive.getvalue())
    _write(folder / SEAL, json.dumps(_FORMAT).encode())


def _write(file: Path, content: bytes) -> None:
    with open(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
