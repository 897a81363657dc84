"""The current code reads every configuration file of the repository."""

from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY

CONFIGS = sorted((REPOSITORY / "model_configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_read(path: Path) -> None:
    # Imported here, so that the other tests of this folder still report why when the package cannot be imported.
    from megatron_rl.config import load_config

    load_config(path)
