"""vLLM multiplies with the trainer's values after loading an NVFP4 export, in both layouts.

`nvfp4_in_vllm.py` says which parts are vLLM's own. Not shown: its FP4 kernels, which need a GPU.
"""

import json
import math
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.sections import Precision
from megatron_rl.conversion import HfCheckpoint, hf_to_megatron, make_random_model
from megatron_rl.conversion.model_files import write_model_files
from megatron_rl.conversion.outgoing import left_out
from megatron_rl.inference.vllm.nccl import NcclSender
from megatron_rl.precision import Selection, amax_of, fake_quantise, quantised_stream, selection_of, stored_format, wire_format
from megatron_rl.weight_mapping import ParameterTable
from megatron_rl.wire.tensor_spec import TensorSpec
from tests.architecture.source import REPOSITORY

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
SMALL = json.loads((REPOSITORY / "tests/data/small_families.json").read_text()) | json.loads(
    (REPOSITORY / "tests/data/small_models.json").read_text()
)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "head_dim": 32,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES = {
    name: SMALL[name]
    | {key: value for key, value in SIZES.items() if key in SMALL[name] or (key == "head_dim" and name == "llama")}
    for name in ("llama", "mixtral_moe", "glm4_moe", "deepseek_v3_moe")
}
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}  # fmt: skip
EXPERTS = {"w13": (("gate_proj", "up_proj"), ("w1", "w3")), "w2": (("down_proj",), ("w2",))}
"""By vLLM's name, as most families and as Mixtral call them."""
ULP = 2**-22
"""vLLM multiplies both scales first, and in the other order: two roundings of fp32 may differ."""


def export(folder: Path, layout: str, *options: str) -> Path:
    asked = ["--quantize", "nvfp4", "--quantize-layout", layout, *options]
    command = [
        sys.executable,
        "-m",
        "megatron_rl.launch.cli",
        "convert",
        "megatron-to-hf",
        folder / "megatron",
        folder / layout,
        *asked,
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / layout


def in_vllm(folder: Path, *update: Path) -> dict[str, Tensor]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = folder.with_suffix(".safetensors")
    command = [sys.executable, "-m", "tests.e2e.nvfp4_in_vllm", str(folder), str(out), str(port), *map(str, update)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return load_file(out)


def trainers_values(source: Mapping[str, Tensor], selection: Selection) -> dict[str, Tensor]:
    """Without a checkpoint in between: each group by its own largest magnitude."""
    amaxes = amaxes_of(source, selection)
    return {name: fake_quantise(source[name].float(), amaxes[group]) for name, group in selection.group_of.items()}


def amaxes_of(source: Mapping[str, Tensor], selection: Selection) -> dict[str, Tensor]:
    amaxes: dict[str, Tensor] = {}
    for name, group in selection.group_of.items():
        amaxes[group] = torch.maximum(amaxes.get(group, torch.zeros(())), amax_of(source[name]))
    return amaxes


def as_vllm_fuses(values: dict[str, Tensor], name: str) -> Tensor:
    """The values that belong into vLLM's tensor `name`."""
    module, _, part = name.rpartition(".")
    if part in EXPERTS:
        prefix = module.removesuffix(".routed_experts")
        names = next(names for names in EXPERTS[part] if f"{prefix}.0.{names[0]}.weight" in values)
        count = sum(found.startswith(f"{prefix}.") and found.endswith(f".{names[0]}.weight") for found in values)
        return torch.stack([torch.cat([values[f"{prefix}.{e}.{n}.weight"] for n in names]) for e in range(count)])
    parent, _, own = module.rpartition(".")
    return torch.cat([values[f"{parent}.{piece}.weight"] for piece in FUSED.get(own, (own,))])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvfp4")
    make_random_model(folder / "hf", MOE, seed=0)
    hf_to_megatron(folder / "hf", folder / "megatron")
    return folder


def check(found: dict[str, Tensor], source: Path, selection: Selection) -> None:
    plain = HfCheckpoint.open(source / "hf")
    values = trainers_values(plain, selection)
    quantised = {name: tensor for name, tensor in found.items() if not name.startswith("plain:") and "_scale" not in name}
    elements = 0
    for name, tensor in quantised.items():
        expected = as_vllm_fuses(values, name)
        elements += expected.numel()
        torch.testing.assert_close(tensor, expected, rtol=ULP, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert elements == sum(tensor.numel() for tensor in values.values())
    full_precision = {
        name.removeprefix("plain:"): tensor
        for name, tensor in found.items()
        if name.startswith("plain:") and name.removeprefix("plain:") in plain
    }
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= full_precision.keys()
    assert any(name.endswith((".gate.weight", "model.norm.weight")) for name in full_precision)
    for name, tensor in full_precision.items():
        assert torch.equal(tensor, plain[name].to(tensor.dtype)), name  # GLM keeps its router in fp32


@pytest.mark.parametrize("layout", [pytest.param("modelopt", marks=pytest.mark.slow), "compressed-tensors"])
def test_vllm_gets_the_trainers_values(source: Path, layout: str) -> None:
    exclude = ["model.layers.0.self_attn", "model.layers.2.mlp.experts"]
    found = in_vllm(export(source, layout, "--quantize-exclude", ",".join(exclude)))
    check(found, source, Selection(ParameterTable(MOE), exclude=exclude))


@pytest.mark.parametrize("precision", [{}, {"activations": "nvfp4", "activation_amax": 64.0}], ids=["w4a16", "w4a4"])
def test_a_weight_update_gives_vllms_nvfp4_layers_the_trainers_values(
    source: Path, tmp_path: Path, precision: dict[str, Any]
) -> None:
    """From the configuration that such servers are started with, and the stream that they are sent, through vLLM's own packing
    for NCCL."""
    section = Precision(training="qat", rollouts="nvfp4", exclude=["model.layers.2.mlp.experts"], **precision)
    plain, table = HfCheckpoint.open(source / "hf"), ParameterTable(MOE)
    selection = selection_of(section, table)
    write_model_files(
        tmp_path, plain.config | {"quantization_config": stored_format(section).config(*left_out(table, selection))}, None
    )
    stream = quantised_stream(
        ((name, plain[name]) for name in plain),
        selection.group_of,
        amaxes_of(plain, selection),
        wire_format(section, own_layers=True),
    )
    save_file(as_nccl_brings_it({name: tensor for name, tensor in stream if tensor is not None}), tmp_path / "update.safetensors")
    found = in_vllm(tmp_path, tmp_path / "update.safetensors")
    check(found, source, selection)
    inputs = [tensor for name, tensor in found.items() if name.endswith(("input_global_scale", "_input_scale"))]
    assert bool(inputs) and (not precision or all(torch.equal(t, torch.full_like(t, 64.0) / 2688) for t in inputs))


class Source(dict[str, Tensor]):
    """A WeightSource."""

    @property
    def specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.items())


def as_nccl_brings_it(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sender and receiver without the network between them, which has a GPU."""
    sender, source, packed = NcclSender("127.0.0.1"), Source(tensors), []
    announced = sender.announcement(source.specs, 1)
    sender._communicator = object()
    sender._broadcast = lambda communicator, stream: packed.append(pack_tensors(stream, lambda item: item[1], 1 << 40))
    assert sender.stream(source) == {}
    (chunk,) = packed
    dtypes = [getattr(torch, name) for name in announced["dtype_names"]]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(announced["shapes"], dtypes, strict=True)]
    return {
        name: tensor.clone()
        for name, tensor in unpack_tensor(chunk.packed_tensor, announced["names"], announced["shapes"], dtypes, sizes)
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_gets_the_values_of_other_families(tmp_path: Path, family: str, layout: str) -> None:
    make_random_model(tmp_path / "hf", FAMILIES[family], seed=0)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    check(in_vllm(export(tmp_path, layout)), tmp_path, Selection(ParameterTable(FAMILIES[family])))


def test_activations_of_four_bits_get_their_scale(source: Path, tmp_path: Path) -> None:
    """A run's [precision] says so; the checkpoint is where a run would save it."""
    run = tmp_path / "run"
    shutil.copytree(source / "megatron", run / "checkpoints" / "megatron")
    (run / "config.toml").write_text(CONFIG)
    found = in_vllm(export(run / "checkpoints", "modelopt"))
    inputs = {name: tensor for name, tensor in found.items() if name.endswith(("input_global_scale", "_input_scale"))}
    assert len(inputs) == 12
    for tensor in inputs.values():
        assert torch.equal(tensor, torch.full_like(tensor, 64.0) / 2688)
    check(found, source, Selection(ParameterTable(MOE)))


CONFIG = f"""
[run]
name = "a"
steps = 1
[model]
architecture = {json.dumps(MOE).replace('": ', '" = ').replace("false", "false")}
max_sequence_length = 64
[task]
name = "products"
[rollouts]
max_new_tokens = 8
[precision]
training = "qat"
rollouts = "nvfp4"
activations = "nvfp4"
activation_amax = 64.0
[weight_sync]
probe_tolerance = 1.0
"""
