"""config.json files as their authors publish them are read, or refused by name (tests/data/published_full.json)."""

import json
from pathlib import Path

import pytest

from megatron_rl.conversion.model_files import QUANTISATION
from megatron_rl.weight_mapping import ParameterTable, UnsupportedArchitectureError

FULL = json.loads((Path(__file__).parents[2] / "data" / "published_full.json").read_text())
REFUSED = "DeepSeek-R1-0528-Qwen3-8B"
# Billions of parameters, as the model cards round them.
SIZES = {
    "Qwen3-Coder-30B-A3B-Instruct": 30.5, "GLM-4.5-Air": 107, "DeepSeek-V3": 671, "DeepSeek-V3 saved by transformers 4.57": 671,
    "Kimi-K2-Instruct": 1026, "Qwen3-8B with YaRN of its model card": 8.2, "gpt-oss-20b": 20.9,
}  # fmt: skip


def architecture(name: str) -> dict:
    return {key: value for key, value in FULL[name].items() if key != QUANTISATION}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_config_is_read(name: str) -> None:
    table = ParameterTable(architecture(name))
    assert table.num_parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)


def test_every_published_config_has_its_row() -> None:
    assert FULL.keys() == {*SIZES, REFUSED}


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="rope of type yarn: attn_factor = 0.878.*: not known"):
        ParameterTable(architecture(REFUSED))


@pytest.mark.parametrize("key", ["unsloth_fixed", "unsloth_version", "_attn_implementation_autoset", "transformers.js_config"])
def test_keys_that_tools_write_are_known(key: str) -> None:
    ParameterTable({**architecture("GLM-4.5-Air"), key: "2026.1"})


@pytest.mark.parametrize(
    ("name", "change"),
    [("GLM-4.5-Air", {"use_new_attention": True}), ("Qwen3-Coder-30B-A3B-Instruct", {"use_qk_norm": False})],
)
def test_a_key_that_may_change_the_model_is_an_error(name: str, change: dict) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=next(iter(change))):
        ParameterTable({**architecture(name), **change})
