"""What is refused before a run begins because of its model's folder."""

from pathlib import Path

import pytest

from megatron_rl.config import Config, ConfigError
from megatron_rl.conversion import QuantisedAs, hf_to_megatron, make_random_model, megatron_to_hf
from megatron_rl.launch.prepare import prepare
from megatron_rl.precision import LAYOUTS

MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


def config(model: Path) -> Config:
    return Config.model_validate({
        "run": {"name": "r", "steps": 1}, "model": {"path": model, "max_sequence_length": 64}, "task": {"name": "products"},
        "rollouts": {"max_new_tokens": 8},
    })  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers_would_be_built_for_a_quantised_folder(tmp_path: Path, layout: str) -> None:
    make_random_model(tmp_path / "whole", MODEL, seed=0)
    hf_to_megatron(tmp_path / "whole", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "quantised", quantise=QuantisedAs(LAYOUTS[layout]()))
    with pytest.raises(ConfigError, match="weights are quantised.*convert hf-to-megatron .*quantised NEW"):
        prepare(config(tmp_path / "quantised"), tmp_path / "run" / "model")
    hf_to_megatron(tmp_path / "quantised", tmp_path / "dequantised")
    for folder in ("whole", "dequantised"):
        assert prepare(config(tmp_path / folder), None)["model_type"] == "qwen3"
