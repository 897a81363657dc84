"""Converts between the two checkpoint formats, one parameter at a time, reading one ahead; no model is built."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rl.conversion.carried import CompletedCheckpoint
from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.hf_reader import HfCheckpoint
from megatron_rl.conversion.hf_writer import DEFAULT_SHARD_BYTES, HfCheckpointWriter, config_of_weights
from megatron_rl.conversion.megatron_checkpoint import MegatronCheckpoint, MegatronCheckpointWriter
from megatron_rl.conversion.opening import table_of
from megatron_rl.conversion.outgoing import Outgoing, Plain, Quantised, QuantisedAs
from megatron_rl.weight_mapping import Parameter, ParameterTable
from megatron_rl.wire.tensor_spec import DTYPE_BYTES, TensorSpec

T = TypeVar("T")
Report = Callable[[int, int], None]
"""report(bytes done, total bytes), after each parameter."""


def hf_to_megatron(
    source: Path,
    out: Path,
    *,
    resume: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    report: Report = lambda done, total: None,
) -> None:
    """Write a dist-checkpoint, with config.json and tokenizer, from a Hugging Face folder.

    Args:
        source: The Hugging Face folder.
        out: The new folder.
        resume: Continue an interrupted conversion of the same source.
        shard_bytes: Size limit of one file, exceeded only by a larger tensor.
        report: Called with the bytes written so far, and the total.

    Raises:
        CheckpointError: `source` is not a complete checkpoint, or `out` exists or cannot be continued.
    """
    checkpoint = HfCheckpoint.open(source)
    checkpoint.check(table_of(checkpoint))
    specs = checkpoint.specs
    config = config_of_weights(checkpoint.config, _main_dtype(specs), specs)
    fingerprint = _fingerprint(checkpoint.folder, specs, shard_bytes)
    writer = MegatronCheckpointWriter(
        out, config, specs, assets_from=source, shard_bytes=shard_bytes, fingerprint=fingerprint, resume=resume
    )
    with writer:
        pending, size_of = writer.pending, partial(_num_bytes, specs)
        progress = _Progress(report, map(size_of, pending), sum(map(size_of, writer.table.parameters)))
        for parameter, rows in zip(pending, read_ahead(partial(_rows, checkpoint, p) for p in pending), strict=True):
            writer.write(parameter, rows)
            progress.advance(size_of(parameter))


def megatron_to_hf(
    source: Path,
    out: Path,
    *,
    quantise: QuantisedAs | None = None,
    resume: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    report: Report = lambda done, total: None,
) -> None:
    """Write a Hugging Face folder from a checkpoint of a run or of `hf_to_megatron`.

    Args:
        source: The Megatron checkpoint.
        out: The new folder.
        quantise: Which matrices are written in NVFP4, and in which format; None: none.
        resume: Continue an interrupted conversion of the same source.
        shard_bytes: Size limit of one file, exceeded only by a larger tensor.
        report: Called with the bytes written so far, and the total.

    Raises:
        CheckpointError: `source` is not a complete checkpoint, or `out` exists or cannot be continued.
        QuantisationError: The model cannot be quantised as asked.
    """
    checkpoint = MegatronCheckpoint.open(source)
    checkpoint.check(ParameterTable(checkpoint.config))
    completed = CompletedCheckpoint(checkpoint)
    outgoing: Outgoing = Quantised(completed, quantise) if quantise else Plain(completed)
    specs = outgoing.specs
    config = {**config_of_weights(checkpoint.config, _main_dtype(checkpoint.specs), completed.specs), **outgoing.config}
    writer = HfCheckpointWriter(
        out,
        specs,
        config,
        assets_from=checkpoint.model_folder,
        shard_bytes=shard_bytes,
        fingerprint=_fingerprint(checkpoint.folder, specs, shard_bytes, quantise),
        resume=resume,
    )
    with writer:
        pending = writer.pending
        progress = _Progress(report, (specs[name].num_bytes for name in pending), sum(spec.num_bytes for spec in specs.values()))
        # The tensors made from one source tensor may be in two files: then each file reads the source.
        parts = [(origin, list(names)) for origin, names in groupby(pending, outgoing.source_of)]
        for (_, names), tensors in zip(parts, read_ahead(partial(outgoing.read, origin) for origin, _ in parts), strict=True):
            for name in names:
                writer.write(name, tensors[name])
                progress.advance(specs[name].num_bytes)


def read_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The jobs' results in order.

    The next job runs in a thread while a result is used, so that two results exist at a time.
    """
    with ThreadPoolExecutor(1) as reader:
        upcoming = None
        for job in jobs:
            following = reader.submit(job)
            if upcoming is not None:
                yield upcoming.result()
            upcoming = following
        if upcoming is not None:
            yield upcoming.result()


class _Progress:
    def __init__(self, report: Report, pending: Iterable[int], total: int) -> None:
        self._report, self._total = report, total
        self._done = total - sum(pending)
        report(self._done, total)

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._report(self._done, self._total)


def _rows(checkpoint: HfCheckpoint, parameter: Parameter) -> list[Tensor]:
    """The copy reads them from the mapped file."""
    return [
        piece.clone(memory_format=torch.contiguous_format)
        for piece in parameter.mapping.row_pieces(parameter.parts_of(checkpoint))
    ]


def _num_bytes(specs: dict[str, TensorSpec], parameter: Parameter) -> int:
    return sum(prod(slot.part_shape) * DTYPE_BYTES[specs[slot.name].dtype] for slot in parameter.hf)


def _main_dtype(specs: dict[str, TensorSpec]) -> str:
    """The dtype of most elements."""
    count: dict[str, int] = {}
    for spec in specs.values():
        count[spec.dtype] = count.get(spec.dtype, 0) + prod(spec.shape)
    if not count:
        raise CheckpointError("the checkpoint holds no tensors")
    return max(count, key=lambda dtype: count[dtype])


def _fingerprint(folder: Path, specs: Mapping[str, TensorSpec], shard_bytes: int, quantise: QuantisedAs | None = None) -> str:
    """Fingerprint of a conversion's input: names, shapes, dtypes, quantisation, and the files' names, sizes and times."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file())
    content = [
        str(folder.resolve()),
        files,
        {name: [*spec.shape, str(spec.torch_dtype)] for name, spec in specs.items()},
        shard_bytes,
        # As earlier versions wrote it, so that --resume finds a conversion that they began.
        repr(quantise).replace("(stored_as=", "(layout=", 1),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
