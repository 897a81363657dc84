"""What a user sees.

Help that teaches, a dry run that starts nothing, and errors that name value, rule and remedy before any work.
"""

import json
import socket
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from megatron_rl.config import load_config, run_folder
from megatron_rl.conversion import make_random_model
from megatron_rl.launch.cli import app

CONFIG = str(Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml")
SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def refused(tmp_path, *words: str) -> str:
    """The message of a run that is refused; nothing was made."""
    result = invoke("train", CONFIG, "--run.folder", str(tmp_path), *words)
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "tiny-moe-cpu" / "logs" / "trainer-0.log").exists()
    return result.output


def test_help_teaches():
    assert "dry-run" in invoke("--help").output
    assert "--resume" in invoke("train", "--help").output
    assert "hf-to-megatron" in invoke("convert", "--help").output


def test_a_dry_run_prints_everything_and_starts_nothing(tmp_path):
    result = invoke("train", CONFIG, "--dry-run", "--run.folder", str(tmp_path), "--run.name", "x")
    assert result.exit_code == 0, result.output
    for expected in (
        "prompts_per_step",
        "parameters = ",
        "rank 1: tp 0, cp 0, dp 1, pp 0, ep 1, layers 0..3, experts 4..7",
        "server-0: ",
        "trainer-1: ",
    ):
        assert expected in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--rollouts.topp", "0.9"), "did you mean top_p?"),
        (("--rollouts.top_p", "1.5"), "rollouts.top_p = 1.5"),
        (("--layout.expert", "3"), "1 x 3"),
        (("--layout.world_size", "16", "--layout.expert", "16"), "num_experts = 8 is not a multiple of ep = 16"),
        (("--task.name", "chain_sun"), "chain_sum"),
        (("--task.reward", "no_such_module:f"), "no_such_module"),
        (("--resume",), "holds no run to resume"),
        (("steps", "5"), "write overrides as --section.key value"),
    ],
)
def test_bad_input_is_named(tmp_path, words, expected):
    assert expected in refused(tmp_path, *words)


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        message = refused(tmp_path, "--servers.first_port", str(port))
    assert f"servers.first_port, server 0: 127.0.0.1:{port}" in message


def from_folder(tmp_path, model: Path, *words: str) -> str:
    """A run on a model folder in place of the demo's architecture."""
    return refused(tmp_path, "--model.architecture", "none", "--model.path", str(model), *words)


def test_a_model_folder_that_is_not_there(tmp_path):
    assert "nowhere" in from_folder(tmp_path, tmp_path / "nowhere")


def test_a_model_that_lacks_a_tensor_names_it(tmp_path):
    model = tmp_path / "model"
    make_random_model(model, SMALL, seed=0)
    file = next(model.glob("*.safetensors"))
    tensors = load_file(file)
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[lost]
    save_file(tensors, file)
    assert lost in from_folder(tmp_path, model)


def test_a_sequence_longer_than_the_model_allows(tmp_path):
    model = tmp_path / "model"
    make_random_model(model, SMALL, seed=0)
    message = from_folder(tmp_path, model, "--model.max_sequence_length", "300")
    assert "max_sequence_length = 300" in message and "256" in message


def test_a_model_without_its_tokenizer(tmp_path):
    model = tmp_path / "model"
    make_random_model(model, SMALL, seed=0)
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json" in from_folder(tmp_path, model)


def test_a_model_of_an_unknown_family(tmp_path):
    model = tmp_path / "model"
    make_random_model(model, SMALL, seed=0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba9", "architectures": ["Mamba9"]}))
    message = from_folder(tmp_path, model)
    assert "mamba9" in message and "qwen3_moe" in message


def test_the_configuration_of_a_run_may_begin_another_one_but_not_continue_with_it(tmp_path, monkeypatch):
    own = run_folder(load_config(Path(CONFIG), ["--run.folder", str(tmp_path)]))
    with own.claimed():
        own.create(load_config(Path(CONFIG), ["--run.folder", str(tmp_path)]))
    begun = []
    monkeypatch.setattr("megatron_rl.launch.local.run_locally", lambda config, folder, resume: begun.append(folder.path.name))
    assert invoke("train", str(own.config_file), "--run.name", "second").exit_code == 0 and begun == ["second"]
    result = invoke("train", str(own.config_file), "--run.name", "second", "--resume")
    assert result.exit_code == 2 and f"is the configuration of the run in {own.path}" in result.output and len(begun) == 1
