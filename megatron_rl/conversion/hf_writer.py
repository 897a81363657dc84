"""Writes a Hugging Face checkpoint folder: planned from names and shapes, filled as tensors arrive, then renamed into place."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.hf_reader import INDEX_FILE, SINGLE_FILE
from megatron_rl.conversion.safetensors_format import StoredTensor, TensorSpec, plan_file
from megatron_rl.layouts import ParameterTable
from megatron_rl.layouts.errors import nearest

DEFAULT_SHARD_BYTES = 5_000_000_000

# What belongs to a model besides config and weights: tokenizer (with its code), chat templates, generation defaults.
_ASSETS = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
)


def write_hf_checkpoint(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    specs: Mapping[str, TensorSpec] | None = None,
    assets_from: str | Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write `tensors` (Hugging Face names, any order) to a new folder that transformers and vLLM can load.

    dtype: of the weights, and what config.json will say; tensors of another dtype are cast.
    specs: the names, shapes and dtypes to expect; by default those of the config's layout table, all in `dtype`.
    assets_from: model folder whose tokenizer, chat template and generation config are copied.
    shard_bytes: limit for one file, exceeded only by a tensor that is larger by itself.

    CheckpointError, and no folder, when a tensor is missing, unknown, repeated or of a wrong shape, or the folder exists.
    """
    if specs is None:
        table = ParameterTable(config)
        specs = {name: TensorSpec(tensor.shape, dtype) for name, tensor in table.hf_tensors.items()}
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": str(dtype).removeprefix("torch.")}
    with HfCheckpointWriter(folder, specs, config, assets_from=assets_from, shard_bytes=shard_bytes) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)


class HfCheckpointWriter:
    """The folder appears when the `with` block ends without an error and every tensor has been written."""

    def __init__(
        self,
        folder: str | Path,
        specs: Mapping[str, TensorSpec],
        config: Mapping[str, Any],
        *,
        assets_from: str | Path | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self._folder = Path(folder)
        self._aside = self._folder.with_name(f".{self._folder.name}.partial-{os.getpid()}")
        self._specs, self._config, self._shard_bytes = dict(specs), dict(config), shard_bytes
        self._assets_from = None if assets_from is None else Path(assets_from)
        self._places: dict[str, StoredTensor] = {}
        self._files: dict[Path, int] = {}
        self._missing = set(self._specs)

    def __enter__(self) -> Self:
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise CheckpointError(f"{self._folder} is already there; remove it or choose another folder")
        if self._assets_from is not None and not self._assets_from.is_dir():
            raise CheckpointError(f"{self._assets_from}, which should give tokenizer and chat template, is not a folder")
        self._aside.mkdir(parents=True)
        try:
            self._lay_out_files()
        except BaseException:
            self._abandon()
            raise
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place, cast to the planned dtype."""
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{name} is not a tensor of this checkpoint{nearest(name, self._places)}")
        if tuple(tensor.shape) != place.spec.shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, expected {list(place.spec.shape)}")
        if name not in self._missing:
            raise CheckpointError(f"{name} was written twice")
        flat = tensor.detach().to("cpu", place.spec.dtype).contiguous().flatten()
        _write_all(self._files[place.file], memoryview(flat.view(torch.uint8).numpy()), place.start)
        self._missing.remove(name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # After success the folder has moved away and nothing is left to remove.
            self._abandon()

    def _lay_out_files(self) -> None:
        groups = _cut(self._specs, self._shard_bytes)
        count = len(groups)
        for number, specs in enumerate(groups, start=1):
            file = self._aside / (SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors")
            header, places = plan_file(file, specs)
            self._places |= places
            self._files[file] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            _write_all(self._files[file], memoryview(header), 0)
        if count > 1:
            _write_json(self._aside / INDEX_FILE, self._index())

    def _index(self) -> dict[str, Any]:
        return {
            "metadata": {
                "total_parameters": sum(torch.Size(spec.shape).numel() for spec in self._specs.values()),
                "total_size": sum(spec.num_bytes for spec in self._specs.values()),
            },
            "weight_map": {name: self._places[name].file.name for name in self._specs},
        }

    def _finish(self) -> None:
        if self._missing:
            names = sorted(self._missing)
            raise CheckpointError(
                f"{len(names)} tensors were never written: {', '.join(names[:10])}{' ...' if names[10:] else ''}"
            )
        for descriptor in self._files.values():
            os.fsync(descriptor)
        _write_json(self._aside / "config.json", self._config)
        if self._assets_from is not None:
            _copy_assets(self._assets_from, self._aside)
        if self._folder.exists():
            self._folder.rmdir()
        self._aside.rename(self._folder)

    def _abandon(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        shutil.rmtree(self._aside, ignore_errors=True)


def _cut(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[dict[str, TensorSpec]]:
    """Consecutive groups of at most `shard_bytes`; a larger tensor is a group by itself."""
    groups: list[dict[str, TensorSpec]] = [{}]
    used = 0
    for name, spec in specs.items():
        if groups[-1] and used + spec.num_bytes > shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = spec
        used += spec.num_bytes
    return groups


def _write_all(descriptor: int, content: memoryview, offset: int) -> None:
    # One call writes at most 2 GiB on Linux.
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_assets(source: Path, target: Path) -> None:
    for pattern in _ASSETS:
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)
