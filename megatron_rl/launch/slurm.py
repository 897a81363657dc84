"""Slurm's own commands, as `launch`, `status` and `stop` use them, and the job of a run."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.wire.control import decode

COMMAND_TIMEOUT_S = 60.0
_PREFERENCES = ("SQUEUE_", "SCANCEL_", "SLURM_", "SLURMD_", "SRUN_")
_OF_THE_SITE = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"}
"""Variables by which Slurm's commands find and enter the cluster."""
_UNKNOWN_JOB = "Invalid job id"
"""squeue's words for a job that Slurm has forgotten, some minutes after its end."""


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
    env = slurm_environment(os.environ)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, env=env)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{' '.join(argv)}: no answer in {COMMAND_TIMEOUT_S:g} s; is the Slurm controller up (sinfo)?"
        ) from error
    if done.returncode:
        raise ConfigError(f"{' '.join(argv)}: {done.stderr.strip() or f'ended with status {done.returncode}'}")
    return done.stdout.strip()


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of Slurm's commands.

    Without the user's preferences for squeue and scancel, which may hide a job that is running, and without the variables of a
    job that this program may itself run in, which would become options of the new job's srun. sbatch's own stay: account,
    partition and QOS may come from there.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(_PREFERENCES) or name in _OF_THE_SITE}
    return {name: value for name, value in kept.items() if name != "SBATCH_EXPORT"}


def options_from_environment(environment: Mapping[str, str]) -> list[str]:
    """NAME=value of each variable from which sbatch will take an option."""
    return [f"{name}={value}" for name, value in sorted(slurm_environment(environment).items()) if name.startswith("SBATCH_")]


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
        ConfigError: squeue is missing or failed: then nobody knows, and the job is not taken for ended.
    """
    if state := _state_in(job, call_slurm("squeue", "--me", "--noheader", "--format=%i %T")):
        return state
    try:  # it may be another user's, or in a partition that is hidden
        return _state_in(job, call_slurm("squeue", "--all", f"--jobs={job.number}", "--noheader", "--format=%i %T"))
    except ConfigError as error:
        if _UNKNOWN_JOB in str(error):
            return None
        raise


def _state_in(job: Job, rows: str) -> str | None:
    """Of rows of number and state; a heterogeneous job's components have +0, +1 behind the number."""
    found = (row.split() for row in rows.splitlines() if row.strip())
    return next((row[-1] for row in found if row[0].partition("+")[0] == job.number), None)
