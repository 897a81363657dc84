"""Every configuration that the repository offers can be read, whole, by the current code."""

from pathlib import Path

import pytest

from megatron_rl.config import load_config
from tests.architecture.source import REPOSITORY

CONFIGS = sorted((REPOSITORY / "model_configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_read(path: Path) -> None:
    load_config(path)
