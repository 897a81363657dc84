"""A Hugging Face checkpoint folder as a lazy mapping from names to tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron_rl.conversion.block_scaled import dequantised
from megatron_rl.conversion.errors import CheckpointError, NameReport
from megatron_rl.conversion.model_files import QUANTISATION, read_config
from megatron_rl.conversion.mxfp4_stored import dequantised_mxfp4
from megatron_rl.conversion.nvfp4_stored import dequantised_nvfp4
from megatron_rl.conversion.safetensors_format import read_header
from megatron_rl.conversion.stored import ReadableTensor, StoredTensor
from megatron_rl.conversion.weight_files import INDEX_FILE, weight_files
from megatron_rl.weight_mapping import ParameterTable
from megatron_rl.wire.tensor_spec import TensorSpec

_WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")


class HfCheckpoint(Mapping[str, Tensor]):
    """A mapping from names to tensors, each memory-mapped at each access.

    Bytes are read when they are touched; a slice touches only its own, and they leave memory with the tensor. Writing to such a
    tensor changes neither the file nor what the next access returns. Block-scaled FP8, MXFP4 and NVFP4 weights are dequantised
    at each access.
    """

    def __init__(self, folder: Path, config: dict[str, Any], stored: dict[str, ReadableTensor]) -> None:
        self.folder = folder
        self.config = config
        """config.json, without the quantisation of weights that are dequantised when they are read."""
        self.stored = stored

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Read config, index and headers.

        Raises:
            CheckpointError: Lists everything that is missing or damaged.
        """
        folder = Path(folder)
        config = read_config(folder)
        problems: list[str] = []
        stored: dict[str, StoredTensor] = {}
        files, index = weight_files(folder)
        for path in files:
            try:
                header = read_header(path)
                problems += [
                    f"{path.name} and {stored[name].file.name} both hold {name}" for name in header.keys() & stored.keys()
                ]
                stored.update(header)
            except FileNotFoundError:
                problems.append(f"{path} does not exist")
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(f"{folder} is not a complete checkpoint; fetch the files again:\n  " + "\n  ".join(problems))
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
        config, readable = dequantised_mxfp4(*dequantised_nvfp4(*dequantised(config, stored)))
        if quantisation := config.get(QUANTISATION):
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
            raise CheckpointError(
                f"{folder}: its weights are quantised as {method!r} with {quantisation}, which cannot be read; what can be read "
                "is FP8 with block scales (DeepSeek-V3, Kimi-K2), MXFP4 (GPT-OSS), and NVFP4 of ModelOpt or compressed-tensors; "
                "use a folder with one of these, or with unquantised weights"
            )
        return cls(folder, config, readable)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs of all tensors, by name; no tensor is read."""
        return {name: stored.spec for name, stored in self.stored.items()}

    def check(self, table: ParameterTable) -> None:
        """Return if it is exactly the table's model.

        Reads headers only, except for the copy of a tied output layer, which must equal its source.

        Raises:
            CheckpointError: Lists all tensors that are missing, unexpected, or of a wrong shape or dtype.
        """
        tied = {copy: source for copy, source in table.tied.items() if copy in self.stored}
        expected = dict(table.hf_shapes)
        expected |= {copy: expected[source] for copy, source in tied.items()}
        report = NameReport(expected, self.stored.keys() - table.optional_names)
        for name in expected.keys() & self.stored.keys():
            spec = self.stored[name].spec
            if spec.shape != expected[name]:
                report.wrong.append(f"wrong shape: {name} is {list(spec.shape)}, expected {list(expected[name])}")
            elif spec.dtype not in _WEIGHT_DTYPES:
                report.wrong.append(f"wrong dtype: {name} is {spec.dtype}; dequantise the checkpoint first")
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
        return self.stored[name].map()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored
