"""Models to plan for: small ones of several families, and published ones."""

import json
import tomllib
from pathlib import Path
from typing import Any

from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement

_ROOT = Path(__file__).parents[3]


def _data(name: str) -> dict[str, Any]:
    return json.loads((_ROOT / "tests" / "data" / name).read_text())


SMALL: dict[str, dict[str, Any]] = _data("small_models.json") | _data("small_families.json")
PUBLISHED: dict[str, dict[str, Any]] = {name: entry["config"] for name, entry in _data("published_configs.json").items()}
DEMO: dict[str, Any] = tomllib.loads((_ROOT / "model_configs" / "tiny-moe-cpu.toml").read_text())["model"]["architecture"]


def placed(config: dict[str, Any], layout: Layout) -> Placement:
    return Placement(ParameterTable(config, padded_vocab_size=layout.padded_vocab_size(config["vocab_size"])), layout)
