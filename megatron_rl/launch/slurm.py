"""Slurm's own commands, as `launch`, `status` and `stop` use them, and the job of a run."""

import shutil
import subprocess
from dataclasses import dataclass

from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.wire.control import decode

COMMAND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """RUN/job.json."""

    number: str
    """Of the job; the same in all of its attempts. Of a heterogeneous job that of its first component."""


def call_slurm(*argv: str) -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        ConfigError: It is missing, or failed; the message has its own words.
    """
    if shutil.which(argv[0]) is None:
        raise ConfigError(f"{argv[0]} is not in PATH: run this command on a node of the cluster, such as a login node")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(argv)}: {done.stderr.strip() or f'ended with status {done.returncode}'}")
    return done.stdout.strip()


def job_of(folder: RunFolder) -> Job | None:
    """The Slurm job of a run; None: the run was started by `megatron-rl train`.

    Raises:
        ConfigError: RUN/job.json is damaged.
    """
    if not folder.job_file.exists():
        return None
    try:
        return decode(folder.job_file.read_bytes(), Job)
    except ValueError as error:
        raise ConfigError(
            f'{folder.job_file} is damaged: it has to name the Slurm job of the run, as {{"number": "4711"}}'
        ) from error


def job_state(job: Job) -> str | None:
    """The job's state as squeue names it, such as 'RUNNING' or 'PENDING'; None: it has ended.

    Raises:
        ConfigError: squeue is missing or failed.
    """
    # By name of the user's own jobs, since squeue fails for the number of a job that it no longer knows.
    rows = [row.split() for row in call_slurm("squeue", "--me", "--noheader", "--format=%i %T").splitlines()]
    return next((state for number, state in rows if number.partition("+")[0] == job.number), None)
