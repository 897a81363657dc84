"""kill -9 of each process of a run at a bad moment: no prompt lost or trained twice, and the same bits as without the kill.

The run continues by itself after a server or a rank of the trainer was killed; after any other process, and where
trainer.max_restarts is 0, with --resume. The tests wait for the moments from outside. One case always runs, the others with

    pytest tests/e2e/test_kill.py -m slow

Not proved here: that data is on disk when the machine itself crashes.
"""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.batching import Spool
from megatron_rl.config import RunFolder
from megatron_rl.metrics import read_rows
from megatron_rl.orchestrator.ledger import Ledger
from tests.e2e.moments import wait_for_new_file
from tests.e2e.runs import REPOSITORY, eventually, kill_9, process_of, processes_of, replay, run, said, train_command

STEPS = 5
PROMPTS = 2
WORDS = ["--run.steps", str(STEPS), "--model.architecture.num_hidden_layers", "2"]
START_S = 300
"""Limit for a run to reach the moment, on a busy machine."""


def after_step(step: int) -> Callable[[RunFolder], None]:
    """Between the optimizer's step and the update of the servers."""

    def wait(folder: RunFolder) -> None:
        assert eventually(lambda: said(folder.logs / "trainer-0.log", f"step {step}: loss"), START_S, every_s=0.002)

    return wait


def while_checkpointing(step: int) -> Callable[[RunFolder], None]:
    def wait(folder: RunFolder) -> None:
        assert eventually(folder.checkpoints.exists, START_S)
        # Earlier ones may come before this looks, or after.
        while wait_for_new_file(folder.checkpoints, ".part", START_S) != f".step_{step:06d}.part":
            pass
        # The engine writes a staging folder inside it, file by file.
        time.sleep(0.05)

    return wait


def while_a_payload_is_written(after: int) -> Callable[[RunFolder], None]:
    def wait(folder: RunFolder) -> None:
        after_step(after)(folder)
        wait_for_new_file(folder.path / "spool" / "rollouts", ".part", START_S)

    return wait


def program(folder: Path) -> int:
    return process_of(folder, "megatron_rl.launch.cli")


def worker(folder: Path) -> int:
    return process_of(folder, "megatron_rl.rollouts.worker")


def server(folder: Path) -> int:
    return process_of(folder, "megatron_rl.inference.vllm.plugin.serve")


def first_rank(folder: Path) -> int:
    return process_of(folder, "megatron_rl.trainer", rank=0)


def second_rank(folder: Path) -> int:
    return process_of(folder, "megatron_rl.trainer", rank=1)


def run_and_kill(folder: RunFolder, moment: Callable[[RunFolder], None], victim: Callable[[Path], int], *words: str) -> int:
    """A run whose victim is killed at the moment; returns the program's exit status when all processes of the run have exited."""
    with open(folder.path.with_suffix(".out"), "wb") as output:
        command = train_command(folder.path, *WORDS, *words)
        started = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
    try:
        assert eventually(lambda: len(list(processes_of(folder.path))) >= 5, START_S)  # itself, server, worker, two ranks
        pid = started.pid if victim is program else victim(folder.path)
        moment(folder)
        kill_9(pid)
        status = started.wait(START_S)
    finally:
        started.kill()
        started.wait()
    assert eventually(lambda: not list(processes_of(folder.path)), 30), list(processes_of(folder.path))
    return status


def fingerprints(folder: RunFolder) -> dict[str, dict]:
    return {file.name: json.loads(file.read_text()) for file in sorted(folder.fingerprints.glob("step_*.json"))}


def assert_every_prompt_was_trained_once(folder: RunFolder) -> None:
    """By the plans and by the ledger of the last checkpoint, prompt by prompt."""
    saved = json.loads((folder.checkpoint(STEPS) / "orchestrator.json").read_text())
    ledger = Ledger.from_json(saved["ledger"], max_attempts=3)  # raises where the totals do not add up
    spool = Spool(folder.path)
    trained = [(step, index) for step in range(STEPS) for index in {e.prompt_index for e in spool.recorded(step).entries}]
    assert len(trained) == len({index for _, index in trained}) == ledger.trained_prompts == STEPS * PROMPTS
    for step, index in trained:
        assert ledger.outcome(index) == f"trained at step {step}"
    others = set(range(ledger.drawn)) - {index for _, index in trained}
    assert all(ledger.outcome(index) in ("buffered", "sampling", "waiting") for index in others)
    assert [row.step for row in read_rows(folder.metrics_file)] == list(range(STEPS))


def assert_equals_a_run_that_was_never_killed(folder: RunFolder) -> None:
    """All steps, rerun from the start without an interruption, give the same bits."""
    again = replay(folder.path, "--from-step", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("same to the bit (by fingerprints)") == STEPS


def resume(folder: RunFolder) -> None:
    before = fingerprints(folder)
    assert before
    done = run(train_command(folder.path, *WORDS, "--resume"), timeout_s=START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    after = fingerprints(folder)
    assert {name: after[name] for name in before} == before  # what had been trained is trained again to the same bits
    assert said(folder.logs / "events.log", "are done again from their recorded plans")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param(after_step(3), program, id="program-before-the-sync"),
        pytest.param(after_step(3), first_rank, id="first-rank-before-the-sync", marks=slow),
        pytest.param(after_step(3), second_rank, id="second-rank-before-the-sync", marks=slow),
        pytest.param(while_checkpointing(4), program, id="program-while-checkpointing", marks=slow),
        pytest.param(while_checkpointing(4), second_rank, id="second-rank-while-checkpointing", marks=slow),
        pytest.param(while_a_payload_is_written(2), worker, id="worker-while-spooling", marks=slow),
        pytest.param(while_a_payload_is_written(2), program, id="program-while-spooling", marks=slow),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, moment, victim):
    folder = RunFolder(tmp_path / "killed")
    assert run_and_kill(folder, moment, victim, "--trainer.max_restarts", "0") != 0
    resume(folder)
    assert_every_prompt_was_trained_once(folder)
    assert_equals_a_run_that_was_never_killed(folder)


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param(after_step(3), second_rank, id="second-rank-before-the-sync"),
        pytest.param(after_step(3), first_rank, id="first-rank-before-the-sync"),
        pytest.param(while_checkpointing(4), first_rank, id="first-rank-while-checkpointing"),
    ],
)
@slow
def test_the_trainer_restarts_in_the_same_run_after_a_rank_is_killed(tmp_path, moment, victim):
    folder = RunFolder(tmp_path / "rank")
    assert run_and_kill(folder, moment, victim) == 0, folder.path.with_suffix(".out").read_text()
    assert said(folder.logs / "events.log", f"the trainer is restarted from {folder.checkpoint(2)}, and catches up to step")
    assert_every_prompt_was_trained_once(folder)
    assert_equals_a_run_that_was_never_killed(folder)


@slow
def test_a_server_killed_before_the_sync_is_replaced_in_the_same_run(tmp_path):
    folder = RunFolder(tmp_path / "server")
    assert run_and_kill(folder, after_step(2), server) == 0
    assert_every_prompt_was_trained_once(folder)
    assert_equals_a_run_that_was_never_killed(folder)
