"""MXFP4 experts against transformers' own conversion, alone and as a small GPT-OSS that is converted there and back.

What it does not prove: that a published folder has these names; they are transformers' (`integrations.mxfp4`).
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.conversion import CheckpointError, HfCheckpoint, hf_to_megatron, megatron_to_hf, open_checkpoint
from megatron_rl.weight_mapping import ParameterTable
from tests.unit.conversion.test_convert import MODELS, write_model

oracle = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors

GPT_OSS = {**MODELS["gpt_oss_moe"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "layer_types": None}
QUANTISATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write_mxfp4(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A folder as GPT-OSS is published; returns the unquantised tensors and what the experts' stand for, by transformers."""
    rng = torch.Generator().manual_seed(3)
    plain = dict(write_model(folder.with_name("plain"), GPT_OSS))
    stored, expected = {name: tensor.clone() for name, tensor in plain.items()}, {}
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=rng).to(torch.uint8)
        scales = torch.randint(118, 125, blocks.shape[:-1], generator=rng).to(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = oracle(blocks, scales, dtype=torch.bfloat16)
        assert expected[name].shape == (experts, inputs, outputs)
    folder.mkdir(parents=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**GPT_OSS, "quantization_config": QUANTISATION}))
    (folder / "tokenizer.json").write_text("a tokenizer")
    return plain, expected


def test_every_code_and_exponent_has_transformers_value(tmp_path: Path) -> None:
    """All 256 bytes with exponents from the smallest to the largest that bf16 holds; three experts of different values."""
    codes = torch.arange(256).repeat(3).reshape(1, 24, 2, 16)
    blocks = torch.cat([codes, codes.flip(-1), codes.flip(1)]).to(torch.uint8)
    scales = torch.linspace(0, 252, 3 * 24 * 2).round().reshape(3, 24, 2).to(torch.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": QUANTISATION}))
    found, expected = HfCheckpoint.open(tmp_path)["x"], oracle(blocks, scales, dtype=torch.bfloat16)
    assert tuple(found.shape) == (3, 64, 24) == tuple(expected.shape) and found.dtype == torch.bfloat16
    for expert in range(3):
        assert torch.equal(found[expert].view(torch.int16), expected[expert].view(torch.int16))  # -0.0 is another value than 0.0
    assert expected.isfinite().all() and expected.unique().numel() > 500


def test_a_published_gpt_oss_is_converted_there_and_back(tmp_path: Path) -> None:
    plain, expected = write_mxfp4(tmp_path / "mxfp4")
    checkpoint = open_checkpoint(tmp_path / "mxfp4")
    assert "quantization_config" not in checkpoint.config
    checkpoint.check(ParameterTable(checkpoint.config))
    hf_to_megatron(tmp_path / "mxfp4", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = HfCheckpoint.open(tmp_path / "back")
    assert back.keys() == plain.keys() and len(expected) == 4
    for name, tensor in {**plain, **expected}.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_scales": None}, r"gate_up_proj_scales is missing"),
        ({"_blocks": None}, r"gate_up_proj_blocks is missing"),
        ({"_scales": torch.zeros(4, 192, 1, dtype=torch.uint8)}, r"_scales is uint8 \[4, 192, 1\], expected uint8 \[4, 192, 2\]"),
        ({"_blocks": torch.zeros(4, 192, 64, dtype=torch.uint8)}, r"_blocks is uint8 \[4, 192, 64\], expected uint8 \[experts"),
        ({"_blocks": torch.zeros(4, 192, 2, 16)}, r"_blocks is float32"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_named(change, message, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = {
        f"{name}_blocks": torch.zeros(4, 192, 2, 16, dtype=torch.uint8),
        f"{name}_scales": torch.zeros(4, 192, 2, dtype=torch.uint8),
    }
    stored |= {name + end: tensor for end, tensor in change.items()}
    save_file({n: t for n, t in stored.items() if t is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**GPT_OSS, "quantization_config": QUANTISATION}))
    with pytest.raises(CheckpointError, match=f"(?s)MXFP4 weights.*{message}"):
        HfCheckpoint.open(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8", "activation_scheme": "static"}]
)
def test_another_quantisation_is_refused_by_name(settings, tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**GPT_OSS, "quantization_config": settings}))
    with pytest.raises(CheckpointError, match=f"quantised as '{settings['quant_method']}' .*cannot be read; what can be read"):
        HfCheckpoint.open(tmp_path)
