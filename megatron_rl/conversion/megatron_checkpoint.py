"""Reads a Megatron dist-checkpoint under Hugging Face names, and writes one; neither builds the model."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from megatron_rl.conversion.errors import CheckpointError, NameReport
from megatron_rl.conversion.hf_writer import DEFAULT_SHARD_BYTES, shards_of
from megatron_rl.conversion.model_files import read_config, write_model_files
from megatron_rl.conversion.partial_folder import PartialFolder
from megatron_rl.conversion.torch_dist import SEAL, ArchiveFile, StoredArray, Written, read_torch_dist, write_metadata
from megatron_rl.weight_mapping import CHECKPOINT, Assembly, Parameter, ParameterTable
from megatron_rl.wire.tensor_spec import TensorSpec, dtype_name

_ENGINE = "engine"
"""Where the checkpoint of a run keeps the trainer's part."""
_NOT_THE_MODEL = ("optimizer.", "rng_state")


def checkpoint_key(parameter: Parameter) -> str:
    """Key of a parameter whose naming is CHECKPOINT."""
    return parameter.template.replace("{expert}.", "").format(layer=parameter.layer)


def stack_index(parameter: Parameter) -> tuple[int, ...]:
    """Index of an expert in the leading dimension of the tensor under that key; () for what is no expert's."""
    return () if parameter.expert is None else (parameter.expert,)


class MegatronCheckpoint(Mapping[str, Tensor]):
    """A mapping from Hugging Face names to tensors, which are assembled from the chunks of a dist-checkpoint at each access.

    The parts of one parameter (q, k and v; gate and up) are read together: access them one after the other.
    """

    def __init__(self, folder: Path, model_folder: Path, arrays: dict[str, StoredArray]) -> None:
        self.folder, self.model_folder = folder, model_folder
        self.config = read_config(model_folder)
        embedding = arrays.get("embedding.word_embeddings.weight")
        self.with_mtp = any(key.startswith("mtp.") for key in arrays)
        """Whether it holds the MTP layers (a converted model may; a run that does not train them has none)."""
        padded = embedding.shape[0] if embedding else None
        self._table = ParameterTable(self.config, padded_vocab_size=padded, naming=CHECKPOINT, with_mtp=self.with_mtp)
        self._arrays = arrays
        self._last: dict[str, Tensor] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a checkpoint of a run (RUN/checkpoints/step_000020, whose config.json is in RUN/model), or a converted one.

        Raises:
            CheckpointError: The folder is not a complete checkpoint, or there is no config.json.
        """
        given = Path(folder).resolve()
        folder = given / _ENGINE if (given / _ENGINE / SEAL).is_file() else given
        arrays = read_torch_dist(folder)
        steps = given if folder != given else given.parent
        places = [folder, steps, steps.parent.parent / "model"]
        model = next((place for place in places if (place / "config.json").is_file()), None)
        if model is None:
            raise CheckpointError(
                f"{folder}: the model's config.json is in none of {', '.join(map(str, places))}; copy it to the first of them"
            )
        return cls(folder, model, arrays)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs of all tensors, by name; no tensor is read."""
        found = {
            slot.name: TensorSpec(slot.name, slot.shape, dtype_name(self._arrays[checkpoint_key(parameter)].dtype))
            for parameter in self._table.parameters
            for slot in parameter.hf
        }
        return found | {copy: replace(found[source], name=copy) for copy, source in self._table.mtp_copies.items()}

    def check(self, table: ParameterTable) -> None:
        """Return if it is the table's model. Nothing is read; the optimizer's state is not part of the model.

        Raises:
            CheckpointError: Lists all tensors that are missing, unexpected or of a wrong shape.
        """
        if table.architecture != self._table.architecture:
            raise CheckpointError(f"{self.folder} is a checkpoint of another model than the given config")
        expected = {
            checkpoint_key(parameter): _stored_shape(parameter, self._table.architecture.contract.num_experts)
            for parameter in self._table.parameters
        }
        found = {key for key in self._arrays if not key.startswith(_NOT_THE_MODEL)}
        report = NameReport(expected, found)
        report.wrong += [
            f"wrong shape: {key} is {list(self._arrays[key].shape)}, expected {list(shape)}"
            for key, shape in sorted(expected.items())
            if key in self._arrays and self._arrays[key].shape != shape
        ]
        if text := report.text():
            raise CheckpointError(f"{self.folder} does not fit {self.model_folder}/config.json:\n  {text}")

    def __getitem__(self, name: str) -> Tensor:
        name = self._table.mtp_copies.get(name, name)
        if name not in self._last:
            self._last, assembly = {}, Assembly()
            for parameter in self._table.by_hf_name(name):
                array = self._arrays.get(checkpoint_key(parameter))
                if array is None:
                    raise KeyError(name)
                self._last |= assembly.add(parameter, array.read(stack_index(parameter)))
        return self._last[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.hf_shapes)

    def __len__(self) -> int:
        return len(self._table.hf_shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._table.hf_shapes


def _stored_shape(parameter: Parameter, num_experts: int) -> tuple[int, ...]:
    return parameter.shape if parameter.expert is None else (num_experts, *parameter.shape)


class MegatronCheckpointWriter:
    """Writes a dist-checkpoint that any layout loads, and the model's other files; the folder appears when it is complete.

    Args:
        folder: The new folder.
        config: config.json of the model.
        hf_specs: Specs of each Hugging Face tensor; their dtypes are kept.
        assets_from: Model folder whose tokenizer, chat template and generation config are copied.
        shard_bytes: Size limit of one file, exceeded only by a larger parameter.
        fingerprint: See PartialFolder.
        resume: See PartialFolder.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any],
        hf_specs: Mapping[str, TensorSpec],
        *,
        assets_from: Path | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        fingerprint: str | None = None,
        resume: bool = False,
    ) -> None:
        self._folder, self._config, self._assets_from = Path(folder), dict(config), assets_from
        self._fingerprint, self._resume = fingerprint, resume
        self.table = ParameterTable(config, naming=CHECKPOINT, with_mtp=bool(ParameterTable(config).mtp_names & hf_specs.keys()))
        self._parameters = {parameter.name: parameter for parameter in self.table.parameters}
        specs = {name: _spec(parameter, hf_specs) for name, parameter in self._parameters.items()}
        self._files = {f"__0_{number}.distcp": list(group) for number, group in enumerate(shards_of(specs, shard_bytes))}
        self._file: ArchiveFile | None = None

    def __enter__(self) -> Self:
        self._partial = PartialFolder(self._folder, self._fingerprint, resume=self._resume)
        self._notes = {file: [Written(**item) for item in note] for file, note in self._partial.finished.items()}
        self._queue = [(file, name) for file, names in self._files.items() if file not in self._notes for name in names]
        return self

    @property
    def pending(self) -> list[Parameter]:
        """Parameters in the order in which `write` takes them."""
        return [self._parameters[name] for _, name in self._queue]

    def write(self, parameter: Parameter, rows: Iterable[Tensor]) -> None:
        """Write the next parameter.

        Args:
            parameter: The first of `pending`.
            rows: The pieces that `ParamMapping.row_pieces` returns.
        """
        file, name = self._queue.pop(0)
        assert name == parameter.name, f"{parameter.name} was written where {name} comes next"
        if self._file is None:
            self._stream = open(self._partial.path / file, "wb")  # noqa: SIM115 - open until its last tensor
            self._file = ArchiveFile(self._stream)
        archive, index, first = self._file, stack_index(parameter), 0
        for piece in rows:
            offsets = (*index, first, *(0 for _ in piece.shape[1:]))
            archive.add(checkpoint_key(parameter), offsets, piece.view((1,) * len(index) + piece.shape))
            first += piece.shape[0]
        if parameter.role.has_matrices:
            archive.add_empty_objects([self._extra_state(parameter)])
        if not self._queue or self._queue[0][0] != file:
            self._close_file(file, archive.written)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._file is not None:
                self._stream.close()
            self._partial.abandon()

    def _extra_state(self, parameter: Parameter) -> str:
        num_experts = self.table.architecture.contract.num_experts
        number, count = (0, 1) if parameter.expert is None else (parameter.expert, num_experts)
        return f"{checkpoint_key(parameter).removesuffix('weight')}_extra_state/shard_{number}_{count}"

    def _close_file(self, file: str, written: list[Written]) -> None:
        self._stream.flush()
        self._notes[file] = written
        self._partial.finish(os.dup(self._stream.fileno()), file, [asdict(item) for item in written])
        self._stream.close()
        self._file = None

    def _finish(self) -> None:
        if self._queue:
            raise CheckpointError(f"{len(self._queue)} parameters were never written, {self._queue[0][1]} the first of them")
        architecture = self.table.architecture
        num_experts = architecture.contract.num_experts
        shapes = {checkpoint_key(p): _stored_shape(p, num_experts) for p in self.table.parameters}
        common = {"step": 0, "architecture": asdict(architecture), "dtype": self._config.get("dtype")}
        write_model_files(self._partial.path, self._config, self._assets_from)
        write_metadata(self._partial.path, self._notes, shapes, common)
        self._partial.publish()


def _spec(parameter: Parameter, hf_specs: Mapping[str, TensorSpec]) -> TensorSpec:
    dtypes = sorted({hf_specs[slot.name].dtype for slot in parameter.hf})
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{', '.join(slot.name for slot in parameter.hf)} have dtypes {' and '.join(dtypes)}, "
            "but Megatron holds them in one tensor; "
            "convert them to one dtype"
        )
    return TensorSpec(parameter.name, parameter.shape, dtypes[0])


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether the folder is a dist-checkpoint or a run's checkpoint."""
    return (folder / SEAL).is_file() or (folder / _ENGINE / SEAL).is_file()
