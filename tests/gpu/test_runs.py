"""Whole runs on GPUs and their reruns: the steps of scripts/gpu_smoke.sh that train and replay. Skipped without enough GPUs."""

from pathlib import Path

import pytest

from megatron_rl.processes.gpus import Gpu, GpuQueryError, query_gpus
from scripts.smoke.runner import Verdict, run_step, why_skipped
from scripts.smoke.steps import steps

RUNS = ("nccl", "tp2", "ep2", "pp2", "deterministic", "rerun", "nvfp4", "nvfp4-native")


@pytest.fixture(scope="module")
def gpus() -> tuple[Gpu, ...]:
    try:
        return tuple(query_gpus())
    except GpuQueryError:
        return ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    """Of the steps so far: some look at what others leave."""
    return []


@pytest.mark.parametrize("name", RUNS)
def test_it_passes(name, gpus, folder, verdicts, report):
    (step,) = (step for step in steps(folder, gpus) if step.name == name)
    if reason := why_skipped(step, gpus, verdicts):
        pytest.skip(reason)
    verdict = run_step(step, folder, step.limit_s)
    verdicts.append(verdict)
    report(**{f"{name}: {number}": value for number, value in verdict.numbers.items()})
    assert verdict.verdict == "pass", verdict.line + "\n" + Path(verdict.log).read_text()[-4000:]
