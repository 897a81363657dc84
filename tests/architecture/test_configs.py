"""The current code reads every configuration file of the repository."""

import json
from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY

CONFIGS = sorted((REPOSITORY / "model_configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_read(path: Path) -> None:
    # Imported here, so that the other tests of this folder still report why when the package cannot be imported.
    from megatron_rl.config import load_config

    load_config(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_model_that_has_to_be_fetched_can_be_looked_at_before(path: Path) -> None:
    """Its published config.json is a model of this program, with the size of the published one."""
    from megatron_rl.config import load_config
    from megatron_rl.conversion.model_files import hf_config_of
    from megatron_rl.weight_mapping import ParameterTable

    config = load_config(path)
    if config.model.path is None:
        return
    assert config.model.published_config == Path("model_configs") / "published" / f"{path.stem}.json"
    config = config.with_values({"model": {"published_config": REPOSITORY / config.model.published_config}})
    known = json.loads((REPOSITORY / "tests" / "data" / "published_configs.json").read_text())[config.model.path.name]
    table = ParameterTable(hf_config_of(config))
    assert table.num_parameters == known["parameters_without_mtp"]
    assert config.model.max_sequence_length <= table.architecture.max_positions
