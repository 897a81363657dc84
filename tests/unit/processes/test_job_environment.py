"""A step of a job that lacks a variable says which, and where to look."""

import pytest

from megatron_rl.wire.nodes import JobEnvironmentError, job_attempt, variable_of_the_job


def test_a_variable_that_is_missing_is_named_with_the_remedy(monkeypatch):
    for name in ("MEGATRON_RL_ATTEMPT", "MEGATRON_RL_LIFE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobEnvironmentError, match="MEGATRON_RL_ATTEMPT is not set: .*srun --export=ALL.*prologue"):
        job_attempt()
    with pytest.raises(JobEnvironmentError, match="SLURM_PROCID is not set"):
        variable_of_the_job("SLURM_PROCID")
    monkeypatch.setenv("MEGATRON_RL_LIFE", "4711.0")
    assert job_attempt() == "4711.0"
