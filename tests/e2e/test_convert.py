"""The conversion commands, as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.conversion import make_random_model

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "moe_intermediate_size": 28, "num_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip


def megatron_rl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_rl.launch.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_random_model(tmp_path / "hf", CONFIG, seed=0)
    return tmp_path / "hf"


def test_there_and_back(model: Path, tmp_path: Path) -> None:
    there = megatron_rl("convert", "hf-to-megatron", model, tmp_path / "megatron")
    assert there.returncode == 0, there.stderr
    back = megatron_rl("convert", "megatron-to-hf", tmp_path / "megatron", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_a_mistake_ends_with_its_message(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-10])
    done = megatron_rl("convert", "hf-to-megatron", model, tmp_path / "megatron")
    assert done.returncode == 2
    assert "fetch the file again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "megatron").exists()
