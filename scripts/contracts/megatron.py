"""Megatron-Core: fields of its configuration that the engine sets, its modules over Transformer Engine, its optimizer library."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .imports import found_in
from .program import transformer_settings
from .source import ChangedSourceError, all_fields, tree_of
from .wheels import ROOT, SOURCE_PACKAGE


def megatron_facts(roots: Mapping[str, Path]) -> dict[str, Any]:
    """Types of the fields; whether the optimizer library has what Megatron imports from it."""
    core = roots["megatron-core"] / "megatron" / "core"
    fields = all_fields(core / "model_parallel_config.py", "ModelParallelConfig")
    for name in ("TransformerConfig", "MLATransformerConfig"):
        fields |= all_fields(core / "transformer" / "transformer_config.py", name)
    return {
        "TransformerConfig": {name: fields.get(name) for name in transformer_settings()},
        "emerging_optimizers": _of_the_optimizer_library(core, roots["emerging-optimizers"]),
    }


def missing_in(facts: Mapping[str, Any]) -> list[str]:
    """Fields and imports that are not there."""
    fields = [f"TransformerConfig has no {name}" for name, kind in facts["TransformerConfig"].items() if kind is None]
    return fields + [
        f"emerging-optimizers has no {name}" for name, found in facts["emerging_optimizers"].items() if found is False
    ]


def _of_the_optimizer_library(core: Path, library: Path) -> dict[str, bool]:
    lines = set()
    for file in (core / "optimizer").rglob("*.py"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("emerging_optimizers") and not node.level:
                lines |= {f"{node.module}: {alias.name}" for alias in node.names}
    return {line: found_in(library, line) is not False for line in sorted(lines)}


def run_over_mocked_engine(program: str, roots: Mapping[str, Path]) -> dict[str, Any]:
    """What a program of this folder prints; its process has Megatron-Core over Transformer Engine's Python.

    Raises:
        ChangedSourceError: It ended with an error.
    """
    paths = (roots["megatron-core"], roots["transformer-engine"], ROOT)
    result = subprocess.run(
        [sys.executable, "-m", f"scripts.contracts.{program}", str(roots[SOURCE_PACKAGE])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode:
        raise ChangedSourceError(f"Megatron-Core over Transformer Engine's modules, {program}: {result.stderr.strip()[-600:]}")
    return json.loads(result.stdout.splitlines()[-1])
