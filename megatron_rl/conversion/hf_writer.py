"""Writes a Hugging Face checkpoint folder: file headers first, tensors as they arrive, then the folder is renamed into place."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.model_files import write_json, write_model_files
from megatron_rl.conversion.partial_folder import PartialFolder
from megatron_rl.conversion.safetensors_format import plan_file
from megatron_rl.conversion.stored import StoredTensor
from megatron_rl.conversion.weight_files import INDEX_FILE, SINGLE_FILE
from megatron_rl.weight_mapping import FAMILIES, ParameterTable
from megatron_rl.weight_mapping.errors import nearest
from megatron_rl.wire.tensor_spec import TensorSpec, dtype_name

DEFAULT_SHARD_BYTES = 5_000_000_000

_BUFFER = "e_score_correction_bias"
"""The router's selection bias is a buffer in transformers, which counts only parameters in the index."""


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
    """Write a new folder that transformers and vLLM can load.

    Args:
        folder: The new folder.
        tensors: Hugging Face names and tensors, in any order.
        config: config.json of the model.
        dtype: Dtype of the weights, also in config.json; tensors of another dtype are cast.
        specs: Names, shapes and dtypes to expect; by default those of the config's model, without MTP layers. Without MTP layers
            among them, config.json has none.
        assets_from: Model folder whose tokenizer, chat template and generation config are copied.
        shard_bytes: Size limit of one file, exceeded only by a larger tensor.

    Raises:
        CheckpointError: A tensor is missing, unknown, repeated or of a wrong shape, or the folder exists. No folder is left then.
    """
    specs = ParameterTable(config).hf_specs(dtype) if specs is None else specs
    config = config_of_weights(config, dtype_name(dtype), specs)
    with HfCheckpointWriter(folder, specs, config, assets_from=assets_from, shard_bytes=shard_bytes) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)


def config_of_weights(config: Mapping[str, Any], dtype: str, names: Iterable[str]) -> dict[str, Any]:
    """config.json of a checkpoint of these tensors; without MTP layers among them it has none either.

    Args:
        config: config.json of the model.
        dtype: Dtype of the weights, such as "bfloat16".
        names: Hugging Face names of the tensors.
    """
    written_out = FAMILIES[config["model_type"]].written_out if config.get("model_type") in FAMILIES else {}
    kept = {**written_out, **{key: value for key, value in config.items() if key != "torch_dtype"}}
    kept["dtype"] = dtype
    mtp_keys = [key for key in ("num_nextn_predict_layers", "num_mtp_layers") if kept.get(key)]
    if mtp_keys and ParameterTable(config).mtp_names.isdisjoint(names):
        kept |= dict.fromkeys(mtp_keys, 0)
    return kept


class HfCheckpointWriter:
    """Takes tensors in any order; the folder appears when the `with` block ends without an error and all are written.

    Args:
        folder: The new folder.
        specs: Names, shapes and dtypes of all tensors.
        config: config.json.
        assets_from: Model folder whose tokenizer, chat template and generation config are copied.
        shard_bytes: Size limit of one file, exceeded only by a larger tensor.
        fingerprint: See PartialFolder.
        resume: See PartialFolder.
    """

    def __init__(
        self,
        folder: str | Path,
        specs: Mapping[str, TensorSpec],
        config: Mapping[str, Any],
        *,
        assets_from: str | Path | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        fingerprint: str | None = None,
        resume: bool = False,
    ) -> None:
        self._folder = Path(folder)
        self._specs, self._config, self._shard_bytes = dict(specs), dict(config), shard_bytes
        self._assets_from = None if assets_from is None else Path(assets_from)
        self._fingerprint, self._resume = fingerprint, resume
        self._places: dict[str, StoredTensor] = {}
        self._files: dict[Path, int] = {}
        self._left: dict[Path, set[str]] = defaultdict(set)
        """Files with tensors that are not written yet."""

    def __enter__(self) -> Self:
        if self._assets_from is not None and not self._assets_from.is_dir():
            raise CheckpointError(f"{self._assets_from} is not a folder; tokenizer and chat template are copied from there")
        self._partial = PartialFolder(self._folder, self._fingerprint, resume=self._resume)
        try:
            self._create_files()
        except BaseException:
            self._abandon()
            raise
        return self

    @property
    def pending(self) -> list[str]:
        """Names of tensors that are not written yet, file by file."""
        return [name for name, place in self._places.items() if name in self._left.get(place.file, ())]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place, cast to the dtype of its spec.

        Raises:
            CheckpointError: The name is unknown or repeated, or the shape is wrong.
        """
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{name} is not a tensor of this checkpoint{nearest(name, self._places)}")
        if tuple(tensor.shape) != place.spec.shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, expected {list(place.spec.shape)}")
        if name not in self._left.get(place.file, ()):
            raise CheckpointError(f"{name} was written twice")
        flat = tensor.detach().to("cpu", place.spec.torch_dtype).contiguous().flatten()
        _write_all(self._files[place.file], flat.view(torch.uint8).numpy().data, place.start)
        self._left[place.file].remove(name)
        if not self._left[place.file]:
            del self._left[place.file]
            self._partial.finish(self._files.pop(place.file), place.file.name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # After success the folder has been renamed and nothing is left to remove.
            self._abandon()

    def _create_files(self) -> None:
        groups = shards_of(self._specs, self._shard_bytes)
        count = len(groups)
        for number, specs in enumerate(groups, start=1):
            file = self._partial.path / (SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors")
            header, places = plan_file(file, specs)
            self._places |= places
            if file.name in self._partial.finished:
                continue
            self._left[file] = set(specs)
            self._files[file] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            _write_all(self._files[file], memoryview(header), 0)
            if not specs:
                self._partial.finish(self._files.pop(file), file.name)
        if count > 1:
            write_json(self._partial.path / INDEX_FILE, self._index())

    def _index(self) -> dict[str, Any]:
        metadata = {"total_size": sum(spec.num_bytes for spec in self._specs.values())}
        if "quantization_config" not in self._config:  # elements of packed weights and scales are not parameters
            metadata["total_parameters"] = sum(
                torch.Size(s.shape).numel() for name, s in self._specs.items() if not name.endswith(_BUFFER)
            )
        return {"metadata": metadata, "weight_map": {name: self._places[name].file.name for name in self._specs}}

    def _finish(self) -> None:
        if names := sorted(self.pending):
            raise CheckpointError(
                f"{len(names)} tensors were never written: {', '.join(names[:10])}{' ...' if names[10:] else ''}"
            )
        write_model_files(self._partial.path, self._config, self._assets_from)
        self._partial.publish()

    def _abandon(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._partial.abandon()


def shards_of(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[dict[str, TensorSpec]]:
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
