"""status, stop and logs, by the folder alone. Not proved here: that a run stops in order (tests/e2e)."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.config import RunFolder
from megatron_rl.launch.cli import app
from megatron_rl.launch.slurm import Job
from megatron_rl.launch.status import RunStatus
from megatron_rl.records import write_atomically
from megatron_rl.wire.control import encode


def folder_with(tmp_path, **changes) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    (folder.logs / "events.log").write_text("checkpoint: step 3\n")
    values = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "running": True,
        "step": 3,
        "steps": 7,
        "version": 2,
        "servers": {"http://127.0.0.1:1": "ready"},
        "stopping": False,
        "failure": "",
        "written_at": time.time(),
    } | changes
    write_atomically(folder.status_file, encode(RunStatus(**values)))
    return folder


def invoke(command: str, folder, *words: str):
    return CliRunner().invoke(app, [command, str(folder.path), *words])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "step 3 of 7, running"),
        ({"stopping": True}, "stopping"),
        ({"written_at": 1e9}, "silent for"),
        ({"running": False}, "stopped"),
        ({"running": False, "step": 7}, "finished"),
        ({"running": False, "failure": "no rollout server is left"}, "failure: no rollout server is left"),
    ],
)
def test_status_tells_the_states_apart(tmp_path, changes, expected):
    result = invoke("status", folder_with(tmp_path, **changes))
    assert result.exit_code == 0 and expected in result.output


def test_a_folder_without_a_run_is_named(tmp_path):
    for command in ("status", "stop"):
        result = invoke(command, RunFolder(tmp_path))
        assert result.exit_code == 2 and str(tmp_path) in result.output


@pytest.mark.parametrize("content", [b"", b'{"broken', b"[]", b"{}"])
def test_a_damaged_status_is_named(tmp_path, content):
    folder = folder_with(tmp_path)
    folder.status_file.write_bytes(content)
    for command in ("status", "stop"):
        result = invoke(command, folder)
        assert (
            result.exit_code == 2 and f"{folder.status_file} is damaged" in result.output and "delete the file" in result.output
        )


def test_logs_of_no_run(tmp_path):
    result = invoke("logs", RunFolder(tmp_path / "nowhere"))
    assert result.exit_code == 2 and "nowhere holds no run" in result.output


def test_servers_of_a_run_that_is_not_running_are_not_changed(tmp_path):
    folder = folder_with(tmp_path, running=False)
    for words in (["add", str(folder.path)], ["remove", str(folder.path), "0"]):
        result = CliRunner().invoke(app, ["servers", *words])
        assert (
            result.exit_code == 2
            and "is not running: set servers.count, the number of servers that it starts with" in result.output
        )


def test_stop_reaches_the_process_that_the_status_names(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "megatron_rl.launch.cli"])
    try:
        result = invoke("stop", folder_with(tmp_path, pid=sleeper.pid))
        assert result.exit_code == 0, result.output
        assert sleeper.wait(10) == -15
    finally:
        sleeper.kill()


def test_stop_leaves_another_process_of_that_number_alone(tmp_path):
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        assert "has exited without stopping in order" in invoke("stop", folder_with(tmp_path, pid=sleeper.pid)).output
        assert sleeper.poll() is None
    finally:
        sleeper.kill()


def test_stop_on_another_machine_is_refused(tmp_path):
    result = invoke("stop", folder_with(tmp_path, host="elsewhere"))
    assert result.exit_code == 2 and "elsewhere" in result.output


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for squeue, which reports this state of job 12, and scancel, which keeps its arguments in the file returned."""

    def stand_in(state: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "squeue").write_text(f"#!/bin/sh\necho '3 RUNNING'\n{f'echo 12+0 {state}' if state else ''}\n")
        (folder / "scancel").write_text(f'#!/bin/sh\necho "$*" > {folder}/words\n')
        for program in folder.iterdir():
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder / "words"

    return stand_in


@pytest.mark.parametrize(
    ("state", "words", "answer"),
    [
        ("RUNNING", "--batch --signal=USR2 12", "finished and saved"),
        ("PENDING", "12", "was PENDING and is cancelled"),
        ("", None, "does not know job 12"),
    ],
)
def test_a_job_is_stopped_by_slurm(tmp_path, slurm, state, words, answer):
    folder = folder_with(tmp_path / "run", host="a-node")
    folder.job_file.write_bytes(encode(Job("12")))
    calls = slurm(state)
    result = invoke("stop", folder)
    assert result.exit_code == 0 and answer in result.output
    assert (calls.read_text().strip() if calls.exists() else None) == words


def test_status_shows_the_job(tmp_path, slurm, monkeypatch):
    folder = folder_with(tmp_path / "run")
    folder.job_file.write_bytes(encode(Job("12")))
    slurm("PENDING")
    assert "job 12: PENDING" in invoke("status", folder).output
    folder.status_file.unlink()
    assert "not started yet" in invoke("status", folder).output
    monkeypatch.setenv("PATH", "")
    assert "squeue is not in PATH" in invoke("status", folder).output


def test_logs_by_name(tmp_path):
    folder = folder_with(tmp_path)
    assert "checkpoint: step 3" in invoke("logs", folder).output
    refused = invoke("logs", folder, "trainer-9")
    assert refused.exit_code == 2 and "logs: events" in refused.output


@pytest.mark.parametrize(("command", "name"), [("status", "status.json"), ("stop", "status.json"), ("logs", "logs/events.log")])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, command, name):
    folder = folder_with(tmp_path)
    (folder.path / name).unlink()
    (folder.path / name).mkdir()
    result = invoke(command, folder)
    assert result.exit_code == 2 and f"{folder.path / name}: Is a directory" in result.output.replace("\n", ""), result.output
