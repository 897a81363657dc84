"""Conversion there and back is bit-equal for every family, goes on after an interruption, and reads FP8; no Megatron is needed.

That Megatron itself loads the checkpoints, at any layout, is shown in tests/distributed/weight_mapping.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.conversion import (
    CheckpointError,
    HfCheckpoint,
    MegatronCheckpoint,
    hf_to_megatron,
    megatron_to_hf,
    open_checkpoint,
    write_hf_checkpoint,
)  # fmt: skip
from megatron_rl.weight_mapping import ParameterTable

DATA = Path(__file__).parents[2] / "data"
MODELS: dict[str, dict[str, Any]] = {
    name: config
    for file in ("small_models.json", "small_families.json")
    for name, config in json.loads((DATA / file).read_text()).items()
}


def write_model(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> HfCheckpoint:
    """Random weights of all tensors, biases and norms too."""
    generator = torch.Generator().manual_seed(0)
    table = ParameterTable(config, with_mtp=bool(config.get("num_nextn_predict_layers")))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in table.hf_shapes.items()}
    write(folder, config, tensors, table, dtype)
    return HfCheckpoint.open(folder)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], table: ParameterTable, dtype: torch.dtype) -> None:
    folder.mkdir(parents=True)
    specs = table.hf_specs(dtype)
    stored = {name: tensor.to(specs[name].torch_dtype) for name, tensor in tensors.items()}
    stored |= {copy: stored[source].clone() for copy, source in table.mtp_copies.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("a tokenizer")
    (folder / "chat_template.jinja").write_text("a template")


def assert_same(found: HfCheckpoint, wanted: HfCheckpoint) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model", MODELS)
def test_there_and_back(tmp_path: Path, model: str) -> None:
    source = write_model(tmp_path / "hf", MODELS[model])
    hf_to_megatron(source.folder, tmp_path / "megatron", shard_bytes=50_000)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=30_000)
    assert_same(HfCheckpoint.open(tmp_path / "back"), source)
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 1
    for folder in ("megatron", "back"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == "a tokenizer"
        assert (tmp_path / folder / "chat_template.jinja").read_text() == "a template"
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_converted_folder_is_a_model_like_any_other(tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", MODELS["gpt_oss_moe"])
    hf_to_megatron(source.folder, tmp_path / "megatron")
    opened = open_checkpoint(tmp_path / "megatron")
    assert isinstance(opened, MegatronCheckpoint)
    opened.check(ParameterTable(opened.config))
    assert all(torch.equal(opened[name], source[name]) for name in source)


def test_layers_for_multi_token_prediction_travel_along(tmp_path: Path) -> None:
    config = {**MODELS["deepseek_v3_moe"], "num_nextn_predict_layers": 1}
    source = write_model(tmp_path / "hf", config)
    assert "model.layers.4.eh_proj.weight" in source
    assert "model.layers.4.mlp.experts.7.down_proj.weight" in source
    assert "model.layers.4.shared_head.head.weight" in source
    source.check(ParameterTable(config))  # not trained, but no mistake
    hf_to_megatron(source.folder, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_same(HfCheckpoint.open(tmp_path / "back"), source)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_an_export_without_these_layers_does_not_promise_them(tmp_path: Path) -> None:
    config = {**MODELS["glm4_moe"], "num_nextn_predict_layers": 1}
    tensors = {name: torch.zeros(shape) for name, shape in ParameterTable(config).hf_shapes.items()}
    write_hf_checkpoint(tmp_path / "out", tensors.items(), config, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is torch.float32
    assert stored["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("convert", [hf_to_megatron, megatron_to_hf])
def test_an_interrupted_conversion_goes_on(tmp_path: Path, convert) -> None:
    source = write_model(tmp_path / "hf", MODELS["qwen3_moe"])
    if convert is megatron_to_hf:
        hf_to_megatron(source.folder, tmp_path / "source")
    else:
        (tmp_path / "hf").rename(tmp_path / "source")
        source = HfCheckpoint.open(tmp_path / "source")

    def stop(done: int, total: int) -> None:
        if done > 0.7 * total:
            raise Interrupted

    with pytest.raises(Interrupted):
        convert(tmp_path / "source", tmp_path / "out", shard_bytes=20_000, report=stop)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="left over from an interrupted conversion: continue it with --resume"):
        convert(tmp_path / "source", tmp_path / "out", shard_bytes=20_000)
    reports: list[tuple[int, int]] = []
    convert(tmp_path / "source", tmp_path / "out", shard_bytes=20_000, resume=True, report=lambda *report: reports.append(report))
    first, total = reports[0]
    assert 0.4 * total < first < 0.8 * total  # whole files are kept, the one that was cut off is written again
    assert reports[-1] == (total, total)
    convert_back(convert, tmp_path)
    assert_same(HfCheckpoint.open(tmp_path / "back"), source)
    assert not list(tmp_path.glob(".*partial*"))


def convert_back(convert, folder: Path) -> None:
    if convert is hf_to_megatron:
        megatron_to_hf(folder / "out", folder / "back")
    else:
        (folder / "out").rename(folder / "back")


def test_an_interrupted_conversion_of_another_source_is_refused(tmp_path: Path) -> None:
    first, second = (write_model(tmp_path / name, MODELS[name]) for name in ("qwen3", "llama"))

    def stop(done: int, total: int) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        hf_to_megatron(first.folder, tmp_path / "out", report=stop)
    with pytest.raises(CheckpointError, match="another source"):
        hf_to_megatron(second.folder, tmp_path / "out", resume=True)


def test_block_scaled_fp8_is_read_as_bf16(tmp_path: Path) -> None:
    config = {
        **MODELS["moonlight_moe"],
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]},
    }
    folder, name = tmp_path / "fp8", "model.layers.0.mlp.down_proj.weight"
    source = write_model(tmp_path / "hf", MODELS["moonlight_moe"])
    tensors, values, scale = dict(source), torch.randn(32, 44), torch.rand(2, 6) + 0.1  # 44 columns: five blocks and a half
    tensors[name] = values.to(torch.float8_e4m3fn)
    folder.mkdir(parents=True)
    save_file({k: v.clone() for k, v in tensors.items()} | {name + "_scale_inv": scale}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    expected = tensors[name].float() * scale.repeat_interleave(16, 0).repeat_interleave(8, 1)[:, :44]
    checkpoint = HfCheckpoint.open(folder)
    assert torch.equal(checkpoint[name], expected.to(torch.bfloat16))
    hf_to_megatron(folder, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = HfCheckpoint.open(tmp_path / "back")
    assert back.keys() == source.keys()
    assert torch.equal(back[name], expected.to(torch.bfloat16))
    assert "quantization_config" not in back.config


def test_fp8_without_a_scale_is_refused(tmp_path: Path) -> None:
    config = {**MODELS["llama"], "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    save_file({"lm_head.weight": torch.zeros(109, 40).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight_scale_inv is missing, expected \[1, 1\] for blocks of \[128, 128\]"
    ):
        HfCheckpoint.open(tmp_path)


def test_what_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", MODELS["llama"])
    with pytest.raises(CheckpointError, match="is not a complete Megatron checkpoint: it has no metadata.json"):
        megatron_to_hf(tmp_path / "hf", tmp_path / "out")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    (tmp_path / "megatron" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is in none of"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out")


def test_metadata_that_would_run_something_are_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    import pickle

    write_model(tmp_path / "hf", MODELS["llama"])
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    (tmp_path / "megatron" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"asks for builtins.print, which no checkpoint needs"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out")


def test_a_run_that_trained_none_of_them_gives_them_back_unchanged(tmp_path: Path) -> None:
    """RUN/model has the layers, the run's checkpoint has not: the export has them, and what repeats the policy is the
    policy's."""
    config = {**MODELS["deepseek_v3_moe"], "num_nextn_predict_layers": 1}
    source = write_model(tmp_path / "run" / "model", config)
    trained = {name: torch.randn(shape) for name, shape in ParameterTable(config).hf_shapes.items()}
    write_hf_checkpoint(tmp_path / "trained", trained.items(), config, dtype=torch.float32)
    step = tmp_path / "run" / "checkpoints" / "step_000003"
    hf_to_megatron(tmp_path / "trained", step / "engine")
    for file in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (step / "engine" / file).unlink(missing_ok=True)  # what a run's checkpoint has not
    megatron_to_hf(step, tmp_path / "back")
    back = HfCheckpoint.open(tmp_path / "back")
    assert back.keys() == source.keys() and back.config["num_nextn_predict_layers"] == 1
    for name, tensor in source.items():
        repeated = ParameterTable(config, with_mtp=True).mtp_copies.get(name, name)
        wanted = trained[repeated].to(back[name].dtype) if repeated in trained else tensor
        assert torch.equal(back[name], wanted), name
    back.check(ParameterTable(back.config, with_mtp=True))  # copies are copies
