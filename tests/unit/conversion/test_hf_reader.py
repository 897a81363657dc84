"""What is wrong with a checkpoint is found before any work, all of it, and named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.conversion import CheckpointError, HfCheckpoint, make_random_model
from megatron_rl.weight_mapping import ParameterTable

MODELS = json.loads((Path(__file__).parents[2] / "data" / "small_models.json").read_text())


def write(folder: Path, tensors: dict[str, torch.Tensor], model: str = "qwen3_moe") -> HfCheckpoint:
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    save_file(tensors, folder / "model.safetensors")
    return HfCheckpoint.open(folder)


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    make_random_model(tmp_path / "model", MODELS["qwen3_moe"], seed=0, tokenizer=None)
    return load_file(tmp_path / "model" / "model.safetensors")


def test_all_mismatches_are_reported_at_once(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.down_projection.weight"] = tensors.pop("model.layers.0.mlp.down_proj.weight")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, tensors).check(ParameterTable(MODELS["qwen3_moe"]))
    message = str(caught.value)
    assert "missing: model.layers.0.mlp.down_proj.weight" in message
    assert "not part of the model: model.layers.0.mlp.down_projection.weight" in message
    assert "nearest expected: 'model.layers.0.mlp.down_proj.weight'" in message
    assert "missing: model.norm.weight" in message
    assert "wrong shape: lm_head.weight is [24, 103], expected [103, 24]" in message
    assert "wrong dtype: model.embed_tokens.weight is float8_e4m3fn" in message


def test_a_kind_of_tensor_that_is_missing_everywhere_takes_one_line(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    kept = {name: tensor for name, tensor in tensors.items() if "up_proj" not in name}
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, kept).check(ParameterTable(MODELS["qwen3_moe"]))
    # 2 sparse layers of 8 experts; the 2 dense layers
    assert "missing: 16 tensors from model.layers.1.mlp.experts.0.up_proj.weight" in str(caught.value)
    assert "model.layers.0.mlp.up_proj.weight, model.layers.2.mlp.up_proj.weight" in str(caught.value)


def test_a_tied_output_layer_may_be_repeated_but_not_differ(tmp_path: Path) -> None:
    make_random_model(tmp_path / "model", MODELS["qwen3"], seed=0, tokenizer=None)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    table = ParameterTable(MODELS["qwen3"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write(tmp_path, tensors, "qwen3").check(table)
    tensors["lm_head.weight"][3, 2] += 1
    with pytest.raises(CheckpointError, match="not tied: lm_head.weight differs"):
        write(tmp_path, tensors, "qwen3").check(table)


def test_values_survive_unaligned_files(tmp_path: Path) -> None:
    values = torch.randn(3, 5)
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length: the data start at an odd byte
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    assert torch.equal(HfCheckpoint.open(tmp_path)["model.norm.weight"], values)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = write(tmp_path, tensors)
    checkpoint["lm_head.weight"].zero_()
    assert torch.equal(checkpoint["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_tensors_leave_memory_when_dropped(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path / "model.safetensors"))

    checkpoint = write(tmp_path, tensors)
    embedding = checkpoint["model.embed_tokens.weight"]
    rows = embedding[3:5]
    del embedding
    assert num_mappings() == 1
    del rows
    assert num_mappings() == 0


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 40, (10).to_bytes(8, "little") + b"not json!!", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_what_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        HfCheckpoint.open(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write(tmp_path, tensors)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="fetch the file again"):
        HfCheckpoint.open(tmp_path)


def test_index_and_files_have_to_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"c": torch.ones(2)}, tmp_path / "two.safetensors")
    index = {"a": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError) as caught:
        HfCheckpoint.open(tmp_path)
    assert "places d in two.safetensors" in str(caught.value)
    assert "one.safetensors holds b, which the index lacks" in str(caught.value)
    index["d"] = "three.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=r"three.safetensors does not exist"):
        HfCheckpoint.open(tmp_path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        HfCheckpoint.open(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        HfCheckpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor .*it has none at all; fetch the weights again"):
        HfCheckpoint.open(tmp_path)


def shards(folder: Path, *numbers: int, of: int = 3, name: str = "model") -> None:
    (folder / "config.json").write_text("{}")
    for number in numbers:
        save_file({f"t{number}": torch.full((2, 3), float(number))}, folder / f"{name}-{number:05d}-of-{of:05d}.safetensors")


def test_complete_shards_without_an_index_are_read(tmp_path: Path) -> None:
    shards(tmp_path, 1, 2, 3)
    found = HfCheckpoint.open(tmp_path)
    assert sorted(found) == ["t1", "t2", "t3"] and all((found[f"t{n}"] == n).all() for n in (1, 2, 3))
    save_file({"t1": torch.ones(2)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(
        CheckpointError, match="model-00003-of-00003.safetensors and model-00001-of-00003.safetensors both hold t1"
    ):
        HfCheckpoint.open(tmp_path)


def test_what_a_folder_without_weights_is_says_its_message(tmp_path: Path) -> None:
    """Each as what it is, with the remedy."""

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            HfCheckpoint.open(tmp_path)

    shards(tmp_path, 1, 3)
    refused("of 3 shards number 2 is missing: the download is not complete; fetch the folder again")
    shards(tmp_path, 2)
    shards(tmp_path, 1, of=1, name="consolidated")
    refused("shards of several checkpoints .consolidated of 1, model of 3.; fetch the index")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    (tmp_path / "pytorch_model-00002-of-00002.bin").touch()
    refused("pickles of PyTorch .pytorch_model-00001-of-00002.bin and 1 more.*save_pretrained")
    (tmp_path / "model.safetensors.incomplete").touch()
    refused("model.safetensors.incomplete belongs to a download that has not finished")
    (tmp_path / "model.safetensors").write_text(POINTER)
    refused("model.safetensors is a pointer of Git LFS, and not the file itself; run `git lfs pull` in ")
    (tmp_path / "config.json").write_text(POINTER)
    refused("config.json is a pointer of Git LFS")
    (tmp_path / "config.json").write_text("{" + '"a":[' * 100_000)
    refused("config.json is not JSON")
    (tmp_path / "config.json").write_text("{}")
    for content, message in (
        ({}, "has no weight_map with a file for each tensor"),
        ({"weight_map": {"a": 1}}, "has no weight_map with a file for each tensor"),
        ({"weight_map": {"a": "../b.safetensors"}}, "names '../b.safetensors', which is not a file of its folder"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        refused(message)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n"
