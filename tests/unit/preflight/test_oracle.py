"""The reference is the saved model: transformers fills none of its weights with random numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.conversion import make_random_model
from megatron_rl.preflight.oracle import Oracle
from tests.unit.conversion.test_convert import MODELS


def test_a_rank_that_a_config_lacks_is_none_for_transformers_too(tmp_path: Path) -> None:
    """As Moonlight has it: null in config.json, which a model written out in TOML cannot say."""
    without = {key: value for key, value in MODELS["moonlight_moe"].items() if key != "q_lora_rank"}
    make_random_model(tmp_path / "m", without, seed=4)
    assert Oracle(tmp_path / "m").logits(np.arange(5))[0].isfinite().all()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_a_family_under_another_name_is_loaded_whole(model_type: str, tmp_path: Path) -> None:
    make_random_model(tmp_path / "m", {**MODELS["moonlight_moe"], "model_type": model_type}, seed=4)
    tokens = np.arange(11) % 7
    first, second = (Oracle(tmp_path / "m").logits(tokens)[0] for _ in range(2))
    assert torch.equal(first, second) and first.std() > 0
