"""Names, shapes and dtypes of the parameters that Megatron-Core builds from Transformer Engine's modules, for small models.

A program of its own, because it mocks Transformer Engine's native extension for the whole process:

    python -m scripts.contracts.te_models TE_TORCH_SOURCE    the libraries and the repository on PYTHONPATH

Prints JSON: by model and layout the parameters of rank 0, and those that differ from the weight mapping. Values are not shown,
nor anything that a module computes.
"""

import enum
import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import TRANSFORMER_ENGINE, ParameterTable, Placement
from tests.distributed.weight_mapping.test_megatron_names import MODELS, config_of, megatron_as

NATIVE = "transformer_engine_torch"
NOT_NEEDED = ("onnxscript", "onnx", "nvdlfw_inspect", "cudnn")
"""Packages that Transformer Engine imports and that no module's construction uses."""
LAYOUTS = {"one rank": Layout(), "tp 2": Layout(world_size=2, tp=2), "ep 2": Layout(world_size=2, ep=2)}


Parameters = dict[str, tuple[tuple[int, ...], str]]
"""Megatron's name to shape and dtype."""


class _Mocked(types.ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Mocks the packages of NOT_NEEDED that are not installed, and their modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in NOT_NEEDED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Mocked(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def native_extension(source: Path) -> types.ModuleType:
    """The extension with its real enumerations, which the Python side compares with its own, and mocks for the rest."""
    module = _Mocked(NATIVE)
    for file in (*source.rglob("pybind_helper.h"), *source.rglob("pybind.cpp")):
        text = file.read_text().replace("\\", "")
        for name, body in re.findall(r'enum_<[^>]*>\(\s*m,\s*"(\w+)"(.*?);', text, re.DOTALL):
            setattr(module, name, enum.IntEnum(name, re.findall(r'\.value\(\s*"(\w+)"', body), start=0))
    return module


def import_transformer_engine(source: Path) -> None:
    """Its Python modules, as they are in the wheel, over the mocked extension."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.modules[NATIVE] = native_extension(source)
    sys.meta_path.append(_Finder())
    package = importlib.machinery.PathFinder.find_spec("transformer_engine")
    assert package is not None
    bare = types.ModuleType("transformer_engine")
    bare.__path__ = list(package.submodule_search_locations or ())
    sys.modules["transformer_engine"] = bare  # so that its `common` can be changed before its own __init__ runs
    from transformer_engine import common

    common.load_framework_extension = lambda framework: None
    del sys.modules["transformer_engine"]
    import transformer_engine.pytorch

    transformer_engine.common = common


def placement_of(model: str, layout: Layout) -> Placement:
    """Where the weight mapping puts the parameters, under the names of Transformer Engine's modules."""
    config = MODELS[model]
    padded = layout.padded_vocab_size(config["vocab_size"])
    return Placement(ParameterTable(config, padded_vocab_size=padded, naming=TRANSFORMER_ENGINE), layout)


def mapped(model: str, layout: Layout) -> Parameters:
    """What rank 0 holds by the weight mapping, in bf16."""
    held = placement_of(model, layout).held_by(0)
    return {name: (tuple(h.shape), str(h.parameter.dtype or torch.bfloat16)) for (_, name), h in held.items()}


def built(model: str, layout: Layout) -> Parameters:
    """What rank 0 holds once Megatron-Core has built the model."""
    from megatron_rl.engine.model import Backend, build_chunks, tensor_of

    placement = placement_of(model, layout)
    padded = placement.table["embedding.word_embeddings.weight"].shape[0]
    config = config_of(layout)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    backend = Backend(transformer_engine=True, apex_gradient_fusion=False)
    gpu = (("is_available", lambda: True), ("get_device_capability", lambda *_: (9, 0)), ("current_device", lambda: "meta"))
    with ExitStack() as stack:
        for name, answer in gpu:
            stack.enter_context(patch.object(torch.cuda, name, answer))
        groups = stack.enter_context(megatron_as(layout, 0))
        stack.enter_context(torch.device("meta"))
        (chunk,) = build_chunks(placement.table.architecture, config, groups, backend, padded_vocab_size=padded)
    tensors = dict(chunk.named_parameters())
    for (_, name), held in placement.held_by(0).items():
        if held.parameter.dtype is not None:  # a buffer, which belongs to the model
            tensors[name] = tensor_of(chunk, name)
    return {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}


def abridged(parameters: Parameters) -> dict[str, str]:
    """Text for each; layers and experts in one line, with a star for their number and all of their shapes."""
    lines: dict[str, list[str]] = {}
    for name, (shape, dtype) in sorted(parameters.items()):
        starred = re.sub(r"(?<=layers\.)\d+|(?<=weight)\d+|(?<=bias)\d+", "*", name)
        lines.setdefault(starred, []).append(f"{dtype.removeprefix('torch.')} {list(shape)}")
    return {name: ", ".join(dict.fromkeys(shapes)) for name, shapes in lines.items()}


def cases() -> Iterator[tuple[str, str, Layout]]:
    """Small model, name of the layout, layout."""
    for model in MODELS:
        yield from ((model, name, layout) for name, layout in LAYOUTS.items() if layout.ep == 1 or "moe" in model)


def stand_in_for_cuda() -> None:
    """The engine's stand-in, but for its hiding of Transformer Engine."""
    from megatron_rl.engine import cpu  # imports Megatron, which asks for Transformer Engine

    with patch.object(cpu, "_hide_gpu_packages"):
        cpu.install()


def main() -> None:
    """Build every small model at every layout that it can have."""
    import_transformer_engine(Path(sys.argv[1]))
    stand_in_for_cuda()
    facts: dict[str, Any] = {}
    differing: dict[str, str] = {}
    for model, name, layout in cases():
        found, expected = built(model, layout), mapped(model, layout)
        facts.setdefault(model, {})[name] = abridged(found)
        one, other = abridged(found), abridged(expected)
        differing |= {
            f"{model}, {name}, {key}": f"built {one.get(key)}, mapped {other.get(key)}"
            for key in sorted({*one, *other})
            if one.get(key) != other.get(key)
        }
        if found.keys() != expected.keys():
            differing[f"{model}, {name}"] = f"names differ: {sorted(found.keys() ^ expected.keys())[:4]}"
    print(json.dumps({"parameters": facts, "other_than_mapped": differing}))


if __name__ == "__main__":
    main()
