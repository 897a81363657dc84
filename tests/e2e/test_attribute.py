"""`megatron-rl attribute` of a run whose rollouts came from a live vLLM while it trained: processes, checkpoints, weights of
older versions.

The factors and the other faults are in tests/distributed/attribution. Not proved here: GPUs, NVFP4.
"""

import json
import subprocess
from pathlib import Path

from megatron_rl.metrics import read_rows
from tests.e2e.runs import PROGRAM, processes_of, run


def attribute(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return run([*PROGRAM, "attribute", str(folder), *words])


def test_what_is_left_of_an_asynchronous_step_under_the_weights_that_sampled_it_is_rounding(recorded, tmp_path):
    done = attribute(recorded.path, "--step", "2", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    # 1e-6 a log-prob by arithmetic in fp32, on either side
    assert found["left"]["mismatch"]["abs_mean"] < 1e-5 and found["faults"] == []
    measured = read_rows(recorded.metrics_file)[2].values
    assert abs(found["as_trained"]["mismatch"]["abs_mean"] - measured["abs_dlogp_mean"]) < 1e-6
    rows = {row["name"]: row for row in found["rows"]}
    stale = rows["staleness 0"]  # whether rollouts were of older versions is up to the two sides' speed
    assert stale["reason"].startswith("all tokens were sampled by") or stale["accounts_for"] > 0
    for name in ("keep-set replay off", "dropout 0.1"):
        assert rows[name]["accounts_for"] < 0, name
    # Other experts for a few tokens may bring stale ones nearer or farther.
    assert rows["routing replay off"]["accounts_for"] is not None
    assert found["worst"][0]["text"]
    (weights,) = [note for note in found["notes"] if note.startswith("weights: ")]
    assert weights.endswith(("trained again, with the recorded metrics", "from checkpoint 2")), weights
    assert not list(processes_of(recorded.path))


def test_a_fault_that_comes_in_with_the_weights_is_named(recorded):
    done = attribute(recorded.path, "--step", "2", "--inject-fault", "swapped-gate-up")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FOUND: gate and up are swapped" in " ".join(done.stdout.split())


def test_a_step_that_cannot_be_had_is_refused_with_those_that_can(recorded):
    refused = attribute(recorded.path, "--step", "7")
    assert refused.returncode == 2 and "the run has trained steps 0 to 2; steps that can be attributed: 0..2" in refused.stderr, (
        refused.stderr
    )
