"""A run that a former version recorded: its steps are rerun to the same bits, and it resumes. The report of it:
tests/unit/report.

Not proved here: runs on GPUs, and the bits on another processor, Python or Megatron-Core than those of the record, where sums may
be taken in another order.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from megatron_rl.metrics import read_rows
from tests.e2e.runs import PROGRAM, processes_of, replay, run
from tests.recorded_run import CPU_OF_THE_RECORD, STEPS, extract

SAME_MACHINE = sys.version_info[:2] == (3, 11) and f": {CPU_OF_THE_RECORD}\n" in Path("/proc/cpuinfo").read_text()


def test_its_steps_are_rerun_to_the_recorded_fingerprints(tmp_path):
    recorded = extract(tmp_path)
    again = replay(recorded.path, "--from-step", "0")
    assert re.findall(r"step (\d): (?:equal|DIFFERS)", again.stdout) == [str(step) for step in range(STEPS)], again.stderr
    if SAME_MACHINE:
        assert again.returncode == 0, again.stdout
        assert len(re.findall(r"equal; \d+ tensors are the same to the bit \(by fingerprints\)", again.stdout)) == STEPS
        return
    # The size of a difference is known where a checkpoint follows the step.
    assert all(float(size) < 1e-4 for size in re.findall(r"by at most ([\d.e+-]+\d)", again.stdout)), again.stdout
    for name, before, now in re.findall(r"(\w+): (\S+) recorded, (\S+) in the rerun", again.stdout):
        assert float(now) == pytest.approx(float(before), rel=1e-2, abs=1e-4), name


def test_it_resumes_from_its_checkpoint_and_trains_the_recorded_plan_first(tmp_path):
    recorded = extract(tmp_path)
    plan = (recorded.path / "spool" / "plans" / "step_000004.json").read_bytes()
    words = ["--run.folder", str(tmp_path), "--resume", "--run.steps", "7"]
    resumed = run([*PROGRAM, "train", str(recorded.config_file), *words])
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [row.step for row in read_rows(recorded.metrics_file)] == list(range(7))
    assert (recorded.path / "spool" / "plans" / "step_000004.json").read_bytes() == plan
    saved = json.loads((recorded.checkpoint(7) / "orchestrator.json").read_text())
    assert saved["ledger"]["trained_prompts"] == 7 * 4
    assert not list(processes_of(recorded.path))
