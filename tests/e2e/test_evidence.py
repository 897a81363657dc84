"""scripts/evidence.sh without its runs, which take an hour: what it refuses, and the table of existing runs."""

import subprocess
import sys

import pytest

from megatron_rl.metrics import Row
from megatron_rl.metrics.rows import JsonLines
from tests.architecture.source import REPOSITORY


def write_run(folder, steps: int, entropy: float) -> None:
    folder.mkdir(parents=True)
    sink = JsonLines(folder / "metrics.jsonl")
    for step in range(steps):
        sink.write(Row(step, {"reward_mean": 0.5, "entropy_full": entropy}, seconds=1.0))
    sink.close()


@pytest.mark.parametrize(
    "words",
    [
        ["--arms", "a,z"],
        ["--arms", "a,c,a"],
        ["--arms"],
        ["--seeds", "one"],
        ["--seeds", "3,3"],
        ["--steps", "0"],
        ["--jobs", "x"],
        ["--fast"],
    ],
    ids=" ".join,
)
def test_a_bad_option_is_refused_by_name_before_anything_is_done(words, tmp_path):
    command = ["bash", str(REPOSITORY / "scripts" / "evidence.sh"), "--folder", str(tmp_path / "runs"), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2 and words[0] in result.stderr
    assert not result.stdout and not (tmp_path / "runs").exists()


def test_the_table_is_of_finished_runs_and_the_others_are_named(tmp_path):
    write_run(tmp_path / "a-seed1", 20, 0.25)
    write_run(tmp_path / "a-seed2", 20, 0.75)
    write_run(tmp_path / "c-seed1", 7, 1.0)
    script = REPOSITORY / "scripts" / "evidence_table.py"
    command = [sys.executable, str(script), str(tmp_path), "--arms", "a,c", "--seeds", "1,2", "--steps", "20"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY)
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in result.stdout.splitlines()]
    assert ["runs", "2", "0"] in cells and ["entropy, full vocabulary, last quarter", "0.5 ± 0.35", "-"] in cells
    assert result.returncode == 1 and "not finished: c-seed1, c-seed2" in result.stdout
