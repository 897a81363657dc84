"""NVFP4 checkpoints, written and read: the trainer's values to the last bit in both formats. What vLLM makes of them:
tests/e2e."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.conversion import CheckpointError, HfCheckpoint, QuantisedAs, hf_to_megatron, megatron_to_hf
from megatron_rl.conversion.outgoing import left_out
from megatron_rl.launch.convert import quantised_as
from megatron_rl.precision import FORMATS, QuantisationError, Selection, amax_of, fake_quantise
from megatron_rl.weight_mapping import ParameterTable
from tests.unit.conversion.test_convert import DATA, MODELS, Interrupted, write_model

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 103,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Inputs of all matrices are multiples of 16, and no matrix is square."""
FAMILIES = {
    name: config | {key: value for key, value in SIZES.items() if key in config}
    for name, config in MODELS.items()
    if name in ("qwen3_moe", "llama", "mixtral_moe", "deepseek_v3_moe", "glm4_moe")
}
PUBLISHED = json.loads((DATA / "published_configs.json").read_text())


def trainers_values(source: Mapping[str, Tensor], selection: Selection) -> dict[str, Tensor]:
    """Whole matrices through NVFP4 in their own dtype, each group by its own largest magnitude."""
    amaxes: dict[str, Tensor] = {}
    for name, group in selection.group_of.items():
        amaxes[group] = torch.maximum(amaxes.get(group, torch.zeros(())), amax_of(source[name]))
    return {name: fake_quantise(source[name], amaxes[group]) for name, group in selection.group_of.items()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture
def qwen(tmp_path: Path) -> HfCheckpoint:
    source = write_model(tmp_path / "hf", FAMILIES["qwen3_moe"])
    hf_to_megatron(source.folder, tmp_path / "megatron")
    return source


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", FAMILIES)
def test_the_trainers_values_to_the_last_bit(tmp_path: Path, model: str, name: str) -> None:
    source = write_model(tmp_path / "hf", FAMILIES[model])
    hf_to_megatron(source.folder, tmp_path / "megatron", shard_bytes=50_000)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=QuantisedAs(FORMATS[name]()), shard_bytes=9_000)
    back = HfCheckpoint.open(tmp_path / "out")
    back.check(ParameterTable(back.config))
    values = trainers_values(source, Selection(ParameterTable(FAMILIES[model])))
    assert len(values) > 12 and "quantization_config" not in back.config
    for name, tensor in source.items():
        assert same_bits(back[name], values.get(name, tensor)), name
    hf_to_megatron(tmp_path / "out", tmp_path / "again")
    megatron_to_hf(tmp_path / "again", tmp_path / "plain")
    assert all(same_bits(tensor, back[name]) for name, tensor in HfCheckpoint.open(tmp_path / "plain").items())


def test_a_fp32_run_keeps_all_bits(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", FAMILIES["qwen3_moe"], torch.float32)
    hf_to_megatron(source.folder, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=QuantisedAs(FORMATS["modelopt"]()))
    back = HfCheckpoint.open(tmp_path / "out")
    for name, tensor in trainers_values(source, Selection(ParameterTable(FAMILIES["qwen3_moe"]))).items():
        assert same_bits(back[name], tensor), name


def test_both_formats_hold_the_same_bytes(qwen: HfCheckpoint, tmp_path: Path) -> None:
    for name, stored_as in FORMATS.items():
        megatron_to_hf(tmp_path / "megatron", tmp_path / name, quantise=QuantisedAs(stored_as(64.0)))
    modelopt, compressed = (load_file(tmp_path / name / "model.safetensors") for name in FORMATS)
    gate, up = (f"model.layers.1.mlp.experts.3.{part}_proj." for part in ("gate", "up"))
    assert torch.equal(modelopt[gate + "weight"], compressed[gate + "weight_packed"])
    assert torch.equal(modelopt[gate + "weight_scale"].float(), compressed[gate + "weight_scale"].float())
    amax = torch.maximum(*(amax_of(qwen[part + "weight"]) for part in (gate, up)))
    for part in (gate, up):  # one global scale, the multiplier here and its inverse there
        assert modelopt[part + "weight_scale_2"].shape == () and modelopt[part + "weight_scale_2"] == 1 / (2688 / amax)
        assert compressed[part + "weight_global_scale"].tolist() == [2688 / amax]
        assert modelopt[part + "input_scale"] == torch.tensor(1.0) / (2688 / torch.tensor(64.0))
        assert compressed[part + "input_global_scale"].tolist() == [42.0]


def test_a_run_says_what_is_quantised(qwen: HfCheckpoint, tmp_path: Path) -> None:
    architecture = json.dumps(FAMILIES["qwen3_moe"]).replace('": ', '" = ')
    run = f"""
        model = {{architecture = {architecture}, max_sequence_length = 64}}
        run = {{name = "a", steps = 1}}
        task = {{name = "products"}}
        rollouts = {{max_new_tokens = 8}}
        weight_sync = {{probe_tolerance = 1.0}}
        precision = {{training = "qat", rollouts = "nvfp4", modules = ["experts"], activations = "nvfp4", activation_amax = 64.0}}
    """
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(run)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    assert quantised_as(checkpoint, "modelopt", None, None) == QuantisedAs(FORMATS["modelopt"](64.0), ("experts",))
    assert quantised_as(checkpoint, "modelopt", ["mlp"], ["model.layers.0"]).exclude == ("model.layers.0",)
    assert quantised_as(tmp_path / "megatron", "compressed-tensors", None, None) == QuantisedAs(FORMATS["compressed-tensors"]())
    with pytest.raises(QuantisationError, match="'int4' is not a format .*; known are modelopt, compressed-tensors"):
        quantised_as(checkpoint, "int4", None, None)


def test_an_interrupted_export_goes_on(qwen: HfCheckpoint, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > 0.6 * total:
            raise Interrupted

    wanted = QuantisedAs(FORMATS["modelopt"]())
    with pytest.raises(Interrupted):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=wanted, shard_bytes=4_000, report=stop)
    other = QuantisedAs(FORMATS["modelopt"](1.0))
    with pytest.raises(CheckpointError, match="another source"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=other, shard_bytes=4_000, resume=True)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=wanted, shard_bytes=4_000, resume=True)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "whole", quantise=wanted)
    found, expected = HfCheckpoint.open(tmp_path / "out"), HfCheckpoint.open(tmp_path / "whole")
    assert found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in expected)


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", FAMILIES["llama"])
    name = "model.layers.2.self_attn.o_proj.weight"
    broken = source[name].clone()
    broken[3, 1] = torch.nan
    save_file(
        {**{n: t.clone() for n, t in source.items()}, name: broken},
        tmp_path / "hf" / "model.safetensors",
        metadata={"format": "pt"},
    )
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=r"model.layers.2.self_attn.o_proj.weight: values that are not finite"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=QuantisedAs(FORMATS["modelopt"]()))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("weight", "o_proj.weight is missing"),
        ("weight_scale", "o_proj.weight_scale is missing"),
        ("weight_scale_2", "o_proj.weight_scale_2 is float32 .2., expected one float32"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(qwen: HfCheckpoint, tmp_path: Path, part: str, message: str) -> None:
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=QuantisedAs(FORMATS["modelopt"]()))
    file = tmp_path / "out" / "model.safetensors"
    tensors, name = load_file(file), f"model.layers.1.self_attn.o_proj.{part}"
    if part == "weight_scale_2":
        tensors[name] = torch.ones(2)
    else:
        del tensors[name]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        HfCheckpoint.open(tmp_path / "out")


def test_what_stays_whole_is_listed(tmp_path: Path) -> None:
    config = {**FAMILIES["deepseek_v3_moe"], "num_nextn_predict_layers": 1}
    table = ParameterTable(config, with_mtp=True)
    modules, experts = left_out(table, Selection(ParameterTable(config), ["mlp", "experts"]))
    assert {
        "lm_head",
        "model.layers.4.eh_proj",
        "model.layers.4.shared_head.head",
        "model.layers.3.mlp.gate",
        "model.layers.0.self_attn.o_proj",
    } <= {*modules}
    assert experts == ["model.layers.4.mlp.experts"]
    assert not any("norm" in name or name == "embed_tokens" for name in modules)
    assert FORMATS["modelopt"]().config(modules, experts)["ignore"][-1] == "model.layers.4.mlp.experts*"
    assert FORMATS["compressed-tensors"]().config(modules, experts)["ignore"][-1] == r"re:model\.layers\.4\.mlp\.experts[.].*"


@pytest.mark.parametrize("model", PUBLISHED)
def test_no_name_on_the_list_is_a_part_of_a_quantised_one(model: str) -> None:
    """vLLM takes an entry of ModelOpt's list for a part of a module's name, too."""
    table = ParameterTable(PUBLISHED[model]["config"])
    if table.architecture.model_type == "gpt_oss":
        selection = Selection(table, ["attention"])
    else:
        selection = Selection(table, exclude=["model.layers.0", "model.layers.1.self_attn"])
    modules, experts = left_out(table, selection)
    layer: dict[str, list[str]] = {}
    for name in selection.group_of:
        layer.setdefault(name.split(".")[2], []).append(name)
    for name in [*modules, *experts]:
        number = name.split(".")[2] if name.count(".") > 2 else None
        assert not [found for found in layer.get(number, ()) if name in found], name


def test_compressed_tensors_reads_config_and_weights(qwen: HfCheckpoint, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor

    megatron_to_hf(tmp_path / "megatron", tmp_path / "out", quantise=QuantisedAs(FORMATS["compressed-tensors"](64.0)))
    written: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(written)
    scheme = read.config_groups["group_0"]
    assert read.format == "nvfp4-pack-quantized" and "lm_head" in read.ignore
    assert NVFP4PackedCompressor.can_compress(torch.nn.Linear, scheme)
    tensors, module = load_file(tmp_path / "out" / "model.safetensors"), "model.layers.3.self_attn.k_proj"
    own = {name.removeprefix(module + "."): tensor for name, tensor in tensors.items() if name.startswith(module + ".")}
    assert {*NVFP4PackedCompressor.compression_param_names(scheme)} == own.keys()
    # It computes in bf16: the product of an E2M1 value with a block's scale is exact there, its product with the global scale
    # rounds twice.
    theirs = NVFP4PackedCompressor.decompress(own, scheme)["weight"]
    torch.testing.assert_close(theirs, HfCheckpoint.open(tmp_path / "out")[module + ".weight"], rtol=2**-6, atol=0)
