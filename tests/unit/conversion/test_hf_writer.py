"""Folders are complete and right, or not there. The safetensors library is the judge of the files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.conversion import CheckpointError, HfCheckpoint, HfCheckpointWriter, write_hf_checkpoint
from megatron_rl.wire.tensor_spec import TensorSpec

SPECS = {
    "a": TensorSpec("a", (3, 5), "bfloat16"),
    "b": TensorSpec("b", (7,), "float32"),
    "c": TensorSpec("c", (3, 7), "uint8"),
    "d": TensorSpec("d", (4, 3), "bfloat16"),
}


def values(specs: dict[str, TensorSpec] = SPECS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.rand(spec.shape, generator=generator) * 200).to(spec.torch_dtype) for name, spec in specs.items()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_mixed_dtypes_in_any_order(tmp_path: Path) -> None:
    with HfCheckpointWriter(tmp_path / "out", SPECS, {"model_type": "x"}) as writer:
        for name, tensor in reversed(values().items()):
            writer.write(name, tensor)
    assert names_in(tmp_path / "out") == ["config.json", "model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == SPECS.keys()
    for name, tensor in values().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses files without it
    for stored in HfCheckpoint.open(tmp_path / "out").stored.values():
        assert stored.start % stored.spec.torch_dtype.itemsize == 0


def test_files_stay_below_the_limit(tmp_path: Path) -> None:
    # bytes: a 30, b 28, c 21, d 24
    with HfCheckpointWriter(tmp_path / "out", SPECS, {}, shard_bytes=50) as writer:
        for name, tensor in values().items():
            writer.write(name, tensor)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    first, second, third = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    assert index == {
        "metadata": {"total_parameters": 15 + 7 + 21 + 12, "total_size": 103},
        "weight_map": {"a": first, "b": second, "c": second, "d": third},
    }
    checkpoint = HfCheckpoint.open(tmp_path / "out")
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in values().items())


def test_a_tensor_above_the_limit_is_a_file_by_itself(tmp_path: Path) -> None:
    with HfCheckpointWriter(tmp_path / "out", SPECS, {}, shard_bytes=1) as writer:
        for name, tensor in values().items():
            writer.write(name, tensor)
    assert len(set(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"].values())) == 4


def test_other_dtypes_and_strides_are_cast_and_packed(tmp_path: Path) -> None:
    master = torch.randn(5, 3, requires_grad=True)
    with HfCheckpointWriter(tmp_path / "out", {"a": SPECS["a"]}, {}) as writer:
        writer.write("a", master.T)
    assert torch.equal(HfCheckpoint.open(tmp_path / "out")["a"], master.detach().T.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"e": torch.zeros(1)}, "e is not a tensor of this checkpoint"),
        ({"a": torch.zeros(3, 5)}, "a was written twice"),
        ({"d": torch.zeros(3, 4)}, r"d has shape \[3, 4\], expected \[4, 3\]"),
        ({}, "1 tensors were never written: d"),
    ],
)
def test_nothing_is_left_of_a_failed_write(tmp_path: Path, extra: dict[str, torch.Tensor], message: str) -> None:
    tensors = values()
    del tensors["d"]

    def write() -> None:
        with HfCheckpointWriter(tmp_path / "out", SPECS, {}) as writer:
            for name, tensor in [*tensors.items(), *extra.items()]:
                writer.write(name, tensor)

    with pytest.raises(CheckpointError, match=message):
        write()
    assert names_in(tmp_path) == []


def test_an_error_of_the_source_leaves_nothing(tmp_path: Path) -> None:
    def interrupted():
        yield "a", values()["a"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf_checkpoint(tmp_path / "out", interrupted(), {}, dtype=torch.bfloat16, specs=SPECS)
    assert names_in(tmp_path) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="already exists"):
        write_hf_checkpoint(tmp_path, values().items(), {}, dtype=torch.bfloat16, specs=SPECS)
    assert names_in(tmp_path) == ["precious"]
    (tmp_path / "empty").mkdir()
    write_hf_checkpoint(tmp_path / "empty", values().items(), {}, dtype=torch.bfloat16, specs=SPECS)
    assert "config.json" in names_in(tmp_path / "empty")


def test_config_says_the_dtype_and_assets_travel_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "additional_chat_templates" / "rag.jinja").write_text("rag")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "pytorch_model.bin", "config.json"):
        (source / name).write_text(name)
    out = tmp_path / "out"
    config = {"torch_dtype": "float32", "model_type": "x"}
    write_hf_checkpoint(out, values().items(), config, dtype=torch.bfloat16, specs=SPECS, assets_from=source)
    assert json.loads((out / "config.json").read_text()) == {"dtype": "bfloat16", "model_type": "x"}
    assert names_in(out) == [
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "rag"


def test_a_source_of_assets_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        write_hf_checkpoint(tmp_path / "out", [], {}, dtype=torch.bfloat16, specs=SPECS, assets_from=tmp_path / "nowhere")
    assert names_in(tmp_path) == []
