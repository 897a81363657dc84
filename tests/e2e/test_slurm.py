"""`megatron-rl launch` on a real Slurm of four nodes (scripts/slurm_four_nodes.py), all of them on this machine: the small run on
CPU as a heterogeneous job, its faults and its end. One case always runs, the others with

    pytest tests/e2e/test_slurm.py -m slow

Not proved here: containers, GPUs, accounting, and that nodes are different machines.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.config import RunFolder
from megatron_rl.launch.slurm import job_of
from megatron_rl.metrics import read_rows
from tests.e2e.runs import CONFIG, PROGRAM, REPOSITORY, SMALL, eventually, kill_9, process_of, processes_of, run, said
from tests.e2e.test_kill import (
    START_S,
    WORDS,
    after_step,
    assert_equals_a_run_that_was_never_killed,
    assert_every_prompt_was_trained_once,
)
from tests.e2e.test_train import key_of

FOUR_NODES = [sys.executable, str(REPOSITORY / "scripts" / "slurm_four_nodes.py")]
REQUEUE_AFTER_S = 20
TWO_AND_TWO = ["--slurm.trainer.nodes", "2", "--slurm.rollouts.nodes", "2", "--servers.count", "2"]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Path]:
    """The folder of a running Slurm of four nodes."""
    if missing := [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not in PATH: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("slurmd has to be started by root")
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    started = subprocess.run(
        [*FOUR_NODES, "up", str(folder), "--requeue-after", str(REQUEUE_AFTER_S)], capture_output=True, text=True, check=False
    )
    assert started.returncode == 0, started.stderr
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    # The job's processes are no children of this one: they find the package by the environment that Slurm passes on.
    patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    yield folder
    subprocess.run([*FOUR_NODES, "down", str(folder)], check=True)
    patch.undo()


class Job:
    """A submitted run."""

    def __init__(self, folder: Path, *words: str):
        self.folder = RunFolder(folder)
        named = ["--run.folder", str(folder.parent), "--run.name", folder.name]
        launched = run([*PROGRAM, "launch", str(CONFIG), *SMALL, *WORDS, *named, *words])
        assert launched.returncode == 0, launched.stdout + launched.stderr
        self.number = job_of(self.folder).number

    def call(self, *argv: str) -> str:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def signal(self, name: str) -> None:
        """As Slurm does before the job's time limit."""
        self.call("scancel", "--batch", f"--signal={name}", self.number)

    @property
    def is_known(self) -> bool:
        return bool(self.call("squeue", "--noheader", "--me"))

    @property
    def log(self) -> str:
        return (self.folder.logs / f"job-{self.number}.log").read_text(errors="replace")

    def wait(self, timeout_s: float = START_S) -> None:
        """Waits until Slurm no longer runs it and has it in no queue."""
        assert eventually(lambda: not self.is_known, timeout_s, every_s=0.5), self.log
        assert eventually(lambda: not list(processes_of(self.folder.path)), 30), list(processes_of(self.folder.path))

    def cancel(self) -> None:
        subprocess.run(["scancel", "--me"], check=False)
        eventually(lambda: not self.is_known, 60, every_s=0.5)


@pytest.fixture
def submitted(slurm) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def submit(folder: Path, *words: str) -> Job:
        jobs.append(Job(folder, *words))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.cancel()


def assert_nothing_was_lost(job: Job) -> None:
    assert said(job.folder.logs / f"job-{job.number}.log", "the orchestrator ended with status 0"), job.log
    assert_every_prompt_was_trained_once(job.folder)
    assert_equals_a_run_that_was_never_killed(job.folder)


def test_a_job_at_its_time_limit_requeues_itself_and_ends_with_the_same_bits(submitted, slurm, tmp_path):
    job = submitted(tmp_path / "requeued", "--slurm.trainer.nodes", "2")
    after_step(1)(job.folder)
    key = key_of(process_of(job.folder.path, "megatron_rl.trainer", rank=0))
    job.signal("USR1")
    assert eventually(lambda: "the orchestrator ended with status 75" in job.log, START_S), job.log
    assert said(job.folder.logs / "events.log", "SIGUSR1: the step in progress is finished and saved")
    status = run([*PROGRAM, "status", str(job.folder.path)]).stdout
    assert "stopped" in status and f"job {job.number}: PENDING" in status, status
    job.wait()
    assert_nothing_was_lost(job)
    files = [file for folder in (job.folder.path, slurm) for file in folder.rglob("*") if file.is_file()]
    assert files and not [file for file in files if key.encode() in file.read_bytes()]


SPANNING = ["--slurm.rollouts.nodes", "2", "--servers.count", "1", "--servers.tensor", "2", "--servers.nodes", "2"]
"""One server whose two workers are on two nodes."""


def node_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(item for item in variables if item.startswith("SLURMD_NODENAME="))


def server_parts(folder: Path) -> tuple[list[int], list[int]]:
    """Processes of the server's head, and of its part on the other node; the first of each is the one that was started."""
    started = [(pid, line) for pid, line in processes_of(folder) if "-m megatron_rl.inference.vllm.plugin.serve " in line]
    return (
        sorted(pid for pid, line in started if "--headless" not in line),
        sorted(pid for pid, line in started if "--headless" in line),
    )


@slow
def test_a_server_that_spans_two_nodes_takes_updates_and_is_started_again_as_a_whole_when_a_part_is_killed(submitted, tmp_path):
    job = submitted(tmp_path / "spanning", *SPANNING)
    after_step(1)(job.folder)
    head, other = server_parts(job.folder.path)
    assert head and other
    assert node_of(head[0]) != node_of(other[0])
    kill_9(other[0])
    job.wait()
    events = job.folder.logs / "events.log"
    assert said(events, "left: its part server-0.1 ended with exit code -9")
    probes = [
        row.values["probe/abs_dlogp_mean"] for row in read_rows(job.folder.metrics_file) if "probe/num_loss_tokens" in row.values
    ]
    assert len(probes) > 1 and max(probes) < 1e-4, probes
    assert "world_size=2 rank=1" in (job.folder.logs / "server-0.1.log").read_text()
    assert job.log.count("the orchestrator ended") == 1
    assert_nothing_was_lost(job)


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_at_most_one_attempt_of_the_job(submitted, tmp_path, rank):
    job = submitted(tmp_path / "rank", *TWO_AND_TWO)
    after_step(3)(job.folder)
    kill_9(process_of(job.folder.path, "megatron_rl.trainer", rank=rank))
    job.wait()
    assert_nothing_was_lost(job)


@slow
def test_a_killed_orchestrator_costs_one_attempt_of_the_job(submitted, tmp_path):
    job = submitted(tmp_path / "orchestrator", *TWO_AND_TWO)
    after_step(3)(job.folder)
    kill_9(
        next(
            pid
            for pid, line in processes_of(job.folder.path)
            if "-m megatron_rl.launch.slurm_job " in line and not line.startswith("srun ")
        )
    )
    job.wait()
    assert "the orchestrator ended with status 137" in job.log
    assert_nothing_was_lost(job)


@slow
def test_a_killed_server_is_replaced_in_the_same_attempt(submitted, tmp_path):
    job = submitted(tmp_path / "server", *TWO_AND_TWO)
    after_step(1)(job.folder)
    kill_9(next(pid for pid, line in processes_of(job.folder.path) if "-m megatron_rl.inference.vllm.plugin.serve " in line))
    job.wait()
    assert said(job.folder.logs / "events.log", "left: ended with exit code -9")
    assert job.log.count("the orchestrator ended") == 1
    assert_nothing_was_lost(job)


@slow
@pytest.mark.parametrize("group", [0, 1])
def test_a_lost_node_costs_at_most_one_attempt_of_the_job(submitted, tmp_path, group):
    """The last node of the role: of the trainer the one without the orchestrator."""
    job = submitted(tmp_path / "node", *TWO_AND_TWO)
    after_step(3)(job.folder)
    nodes = dict(row.split() for row in job.call("squeue", "--noheader", "--me", "--format=%i %N").splitlines())
    node = job.call("scontrol", "show", "hostnames", nodes[f"{job.number}+{group}"]).split()[-1]
    job.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")  # it comes back by itself (ReturnToService)
    job.wait()
    assert_nothing_was_lost(job)


@slow
def test_stop_ends_a_job_and_launch_resumes_it(submitted, tmp_path):
    job = submitted(tmp_path / "run", *TWO_AND_TWO, "--run.steps", "500")
    after_step(2)(job.folder)
    assert run([*PROGRAM, "stop", str(job.folder.path)]).returncode == 0
    job.wait()
    assert ", stopped (" in run([*PROGRAM, "status", str(job.folder.path)]).stdout
    step = job.folder.latest_checkpoint()[0]
    again = submitted(job.folder.path, *TWO_AND_TWO, "--resume", "--run.steps", str(step + 2))
    again.wait()
    assert ", finished (" in run([*PROGRAM, "status", str(job.folder.path)]).stdout
    assert json.loads((again.folder.checkpoint(step + 2) / "orchestrator.json").read_text())["ledger"]["trained_prompts"] == 2 * (
        step + 2
    )


@slow
def test_a_cancelled_job_saves_and_is_not_requeued(submitted, tmp_path):
    job = submitted(tmp_path / "cancelled", "--run.steps", "500")
    after_step(2)(job.folder)
    job.call("scancel", job.number)
    job.wait()
    assert job.folder.latest_checkpoint()[0] > 2
    assert said(job.folder.logs / "events.log", "SIGTERM")
