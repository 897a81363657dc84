"""That the benchmark runs and what it writes. Says nothing of speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_quick_benchmark(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_muon.py"), "--quick", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert 1 <= written["busiest_over_mean_dp4"] <= 1.15
    assert all(written[name] > 0 and f"{name} = " in result.stdout for name in ("step_over_adamw", "step_over_naive_muon"))
    assert set(written["seconds"]) == {"dp2", "tp2"} and set(written["plans"]) == {"Qwen3-235B-A22B", "Kimi-K2"}
