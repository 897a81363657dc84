"""That the simulation of a large run runs through and what it writes. Says nothing of how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_small_simulation(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "simulate_scale.py"), "--servers", "4", "--steps", "2", "--rollouts", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], check=False, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rollouts"] == 2 * (4 // 2) * 16  # steps x prompts x samples, each trained once
    assert all(value > 0 for value in written.values()), written
    assert written["orchestrator_cores_2048"] == written["orchestrator_cores"] * 512
    assert all(part in result.stdout for part in ("orchestrator ", "worker ", "spool ", "weight update "))


def test_a_fleet_of_one_is_refused():
    command = [sys.executable, str(ROOT / "scripts" / "simulate_scale.py"), "--servers", "1"]
    result = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 2 and "--servers is at least 2" in result.stderr
