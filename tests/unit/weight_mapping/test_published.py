"""The nine published models: their configs give the published architectures, to the last parameter, and fit their layouts."""

import json
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.weight_mapping import ParameterTable, Placement

ROOT = Path(__file__).parents[3]
PUBLISHED = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())
# Billions that take part in one token, as their makers say.
ACTIVE = {
    "Qwen3-30B-A3B": 3.3, "Qwen3-235B-A22B": 22, "DeepSeek-V3": 37, "Kimi-K2": 32, "Moonlight-16B-A3B": 3, "GLM-4.5-Air": 12,
    "GLM-4.5": 32, "GPT-OSS-120B": 5.1, "Mixtral-8x7B": 12.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> dict[str, ParameterTable]:
    return {}


def table_of(tables: dict[str, ParameterTable], name: str) -> ParameterTable:
    if name not in tables:
        padded = load_config(ROOT / "model_configs" / f"{name.lower()}.toml").parallel_layout.padded_vocab_size(
            PUBLISHED[name]["config"]["vocab_size"]
        )
        tables[name] = ParameterTable(PUBLISHED[name]["config"], padded_vocab_size=padded)
    return tables[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_to_the_last_one(tables: dict[str, ParameterTable], name: str) -> None:
    table = table_of(tables, name)
    assert table.num_parameters == PUBLISHED[name]["parameters_without_mtp"]
    biases = sum(shape[0] for tensor, shape in table.hf_shapes.items() if tensor.endswith("e_score_correction_bias"))
    assert biases == PUBLISHED[name]["router_bias_elements"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_active_parameters(tables: dict[str, ParameterTable], name: str) -> None:
    # Makers round, and count the embedding or do not.
    assert table_of(tables, name).num_active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.15)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layout_of_its_config_divides(tables: dict[str, ParameterTable], name: str) -> None:
    config, table = load_config(ROOT / "model_configs" / f"{name.lower()}.toml"), table_of(tables, name)
    layout = config.parallel_layout
    Placement(table, layout)
    layers = [layer for stage in range(layout.pp) for layer in layout.layers_of_stage(table.architecture.num_layers, stage)]
    assert sorted(layers) == list(range(table.architecture.num_layers))  # interleaved stages hold theirs out of order
    assert config.model.max_sequence_length <= table.architecture.max_position_embeddings


def test_every_published_model_has_a_config() -> None:
    assert {f"{name.lower()}.toml" for name in PUBLISHED} <= {file.name for file in (ROOT / "model_configs").glob("*.toml")}
