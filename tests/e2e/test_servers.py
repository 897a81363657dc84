"""A server joins a run in progress and its first server is removed: by the command line, with real vLLM servers."""

import subprocess

import pytest

from megatron_rl.config import RunFolder
from megatron_rl.metrics import read_rows
from tests.e2e.runs import PROGRAM, REPOSITORY, eventually, replay, run, said, train_command

WORDS = ["--run.steps", "1000", "--model.architecture.num_hidden_layers", "2", "--checkpoint.every", "100"]
START_S = 300


def servers(folder: RunFolder, *words: str) -> subprocess.CompletedProcess:
    return run([*PROGRAM, "servers", words[0], str(folder.path), *words[1:]])


def last_step(folder: RunFolder) -> int:
    return max(row.step for row in read_rows(folder.metrics_file))


@pytest.mark.slow
def test_a_server_joins_and_the_first_one_leaves(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with open(tmp_path / "out", "wb") as output:
        started = subprocess.Popen(train_command(folder.path, *WORDS), cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
    try:
        assert eventually(lambda: said(folder.logs / "trainer-0.log", "step 0: loss"), START_S)
        added = servers(folder, "add")
        assert added.returncode == 0 and "servers 1 are starting" in added.stdout, added.stdout + added.stderr
        assert eventually(lambda: said(folder.logs / "trainer-0.log", ": 2 servers hold it"), START_S)
        removed = servers(folder, "remove", "0")
        assert removed.returncode == 0 and "servers 0 are removed" in removed.stdout, removed.stdout + removed.stderr
        refused = servers(folder, "remove", "1")
        assert refused.returncode == 2 and "server 1 is the last one" in refused.stderr
        assert eventually(lambda: said(folder.logs / "events.log", "server 0"), START_S)
        later = last_step(folder) + 4  # beyond what the staleness bound lets the first server have sampled
        assert eventually(lambda: last_step(folder) >= later, START_S)
        assert run([*PROGRAM, "stop", str(folder.path)]).returncode == 0
        assert started.wait(START_S) == 0, (tmp_path / "out").read_text()
    finally:
        started.kill()
        started.wait()
    assert said(folder.logs / "events.log", "removed from the fleet")
    again = replay(folder.path, "--from-step", "0", "--steps", "5")
    assert again.returncode == 0, again.stdout + again.stderr
    gone = servers(folder, "add")
    assert gone.returncode == 2 and "does not run" in gone.stderr
