"""The description of an NVFP4 checkpoint: what ModelOpt writes into config.json, next to what the program writes."""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.precision.checkpoint import FORMATS

from .source import execute, fields_of

EXCLUDED = ["lm_head"]
ALGORITHMS = {"NVFP4": 64.0, "W4A16_NVFP4": None}
"""ModelOpt's names, and the largest activation that the program is given: None where activations are not quantised."""


def quantisation_facts(modelopt: Path, engine: Path) -> dict[str, Any]:
    """ModelOpt's own words for its two NVFP4 formats, and the recipes of Transformer Engine."""
    file = modelopt / "modelopt" / "torch" / "export" / "convert_hf_config.py"
    given = {"warnings": warnings, "defaultdict": defaultdict}
    convert = execute(
        file, ["_quant_algo_to_group_config", "convert_hf_quant_config_format"], given
    ).convert_hf_quant_config_format
    described = {
        name: convert({"quantization": {"quant_algo": name, "group_size": 16, "exclude_modules": EXCLUDED}})
        for name in ALGORITHMS
    }
    recipe = engine / "transformer_engine" / "common" / "recipe" / "__init__.py"
    return {"modelopt": described, "NVFP4BlockScaling": fields_of(recipe, "NVFP4BlockScaling")}


def differences(facts: Mapping[str, Any]) -> list[str]:
    """Keys that ModelOpt writes with another value than the program, or that the program leaves out."""
    problems = []
    for name, amax in ALGORITHMS.items():
        own = FORMATS["modelopt"](amax).config(EXCLUDED, [])
        theirs = facts["modelopt"][name]
        problems += [
            f"{name}: the program writes {key} = {own.get(key)}, ModelOpt {theirs.get(key)}"
            for key in ("quant_algo", "config_groups", "ignore")
            if own.get(key) != theirs.get(key)
        ]
    return problems
