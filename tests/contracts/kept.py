"""The kept facts, and the packages that they are derived from."""

import json
import os
from pathlib import Path

from scripts.contracts.wheels import ROOT, pinned_versions, sources

FACTS = json.loads((ROOT / "tests" / "data" / "gpu_contracts.json").read_text())
DERIVE = "run `.venv/bin/python scripts/gpu_contracts.py --cache DIR`"


def cache_folder(scratch: Path) -> Path:
    """$GPU_CONTRACTS_CACHE, which keeps the downloads (450 MB) from one call to the next, or `scratch`."""
    folder = Path(os.environ.get("GPU_CONTRACTS_CACHE", str(scratch)))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def downloaded(package: str, scratch: Path) -> Path:
    """The source of one pinned package."""
    return sources({package: pinned_versions()[package]}, cache_folder(scratch))[package]
