"""Every configuration that the repository offers can be read, whole, by the current code."""

from pathlib import Path

import pytest

from tests.architecture.source import REPOSITORY

CONFIGS = sorted((REPOSITORY / "model_configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_read(path: Path) -> None:
    # Here and not on top: when the package does not import, the tests beside this one must still say why.
    from megatron_rl.config import load_config

    load_config(path)
