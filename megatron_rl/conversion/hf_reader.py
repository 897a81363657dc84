"""A Hugging Face checkpoint folder as a lazy mapping from names to tensors."""

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError, NameReport
from megatron_rl.conversion.safetensors_format import StoredTensor, read_header
from megatron_rl.layouts import ParameterTable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class HfCheckpoint(Mapping[str, Tensor]):
    """Each access maps the tensor's bytes from its file: they are read when they are touched, a slice touches only its own,
    and they leave memory with the tensor. Writing to such a tensor changes neither the file nor what the next access returns.
    """

    def __init__(self, folder: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self.config = config
        """config.json as it is."""
        self.stored = stored

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Read config, index and headers. CheckpointError lists everything that is missing or broken."""
        folder = Path(folder)
        config = read_config(folder)
        problems: list[str] = []
        stored: dict[str, StoredTensor] = {}
        index = _read_index(folder)
        for file in sorted(set(index.values())) if index else [SINGLE_FILE]:
            try:
                stored.update(read_header(folder / file))
            except FileNotFoundError:
                problems.append(f"{folder / file} is not there")
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(f"{folder} is not a complete checkpoint:\n  " + "\n  ".join(problems))
        for name, file in index.items():
            if name not in stored or stored[name].file.name != file:
                problems.append(f"the index places {name} in {file}, which does not hold it")
        problems += [
            f"{entry.file.name} holds {name}, which the index lacks"
            for name, entry in stored.items()
            if index and name not in index
        ]
        if problems:
            raise CheckpointError(f"{folder}: {INDEX_FILE} and the files disagree:\n  " + "\n  ".join(problems))
        return cls(folder, config, stored)

    def check(self, table: ParameterTable) -> None:
        """CheckpointError, with all that is missing, left over, or of a wrong shape or dtype, unless it is exactly the
        table's model. Reads headers only, except for the copy of a tied output layer, which has to be a copy."""
        tied = {copy: source for copy, source in table.tied.items() if copy in self.stored}
        expected = {tensor.name: tensor.shape for tensor in table.hf_tensors.values()}
        expected |= {copy: expected[source] for copy, source in tied.items()}
        report = NameReport(expected, self.stored)
        for name in expected.keys() & self.stored.keys():
            spec = self.stored[name].spec
            if spec.shape != expected[name]:
                report.wrong.append(f"wrong shape: {name} is {list(spec.shape)}, expected {list(expected[name])}")
            elif spec.dtype not in _WEIGHT_DTYPES:
                report.wrong.append(f"wrong dtype: {name} is {spec.dtype}; quantised weights have to be dequantised first")
        report.wrong.sort()
        if not report.text():
            report.wrong += [
                f"not tied: {copy} differs from {source}, but the config says tie_word_embeddings"
                for copy, source in tied.items()
                if not torch.equal(self[copy], self[source])
            ]
        if text := report.text():
            raise CheckpointError(
                f"{self.folder} does not fit its config (model_type {self.config.get('model_type')}):\n  {text}"
            )

    def __getitem__(self, name: str) -> Tensor:
        return _map(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored


def _map(entry: StoredTensor) -> Tensor:
    spec = entry.spec
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    # A mapping starts at a page. One per tensor, not per file: a private mapping counts as memory that might be needed, and
    # the kernel refuses one that is larger than the machine's.
    offset = entry.start % mmap.ALLOCATIONGRANULARITY
    with open(entry.file, "rb") as stream:
        pages = mmap.mmap(stream.fileno(), offset + spec.num_bytes, access=mmap.ACCESS_COPY, offset=entry.start - offset)
    found = torch.frombuffer(pages, dtype=torch.uint8, offset=offset, count=spec.num_bytes)
    if offset % spec.dtype.itemsize:
        # Files by other writers need not be aligned; a typed view has to be.
        found = found.clone()
    return found.view(spec.dtype).view(spec.shape)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no config.json")
    return _read_json(file)


def _read_index(folder: Path) -> dict[str, str]:
    """File of each tensor; empty for a checkpoint of one file."""
    file = folder / INDEX_FILE
    if not file.is_file():
        return {}
    return _read_json(file).get("weight_map", {})


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} has to be a JSON object")
    return content
