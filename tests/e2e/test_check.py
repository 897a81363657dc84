"""`megatron-rl check`: a healthy run passes, with the real vLLM; each injected fault fails in its own stage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.config import load_config
from megatron_rl.conversion.model_files import hf_config_of
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.launch.cli import app
from megatron_rl.preflight.check import run_stages
from megatron_rl.preflight.preparation import make_subject, small_run

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "model_configs" / "tiny-moe-cpu.toml"


def check(*words: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "megatron_rl.launch.cli", "check", str(CONFIG), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600, cwd=REPOSITORY, check=False)


def test_the_demo_passes_and_says_its_numbers(tmp_path):
    file = tmp_path / "check.json"
    done = check("--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["passed"] and report["layout"]["expert"] == 2
    assert [stage["name"] for stage in report["stages"]] == ["conversion", "forward", "layout", "replay", "sync"]
    for stage in report["stages"]:
        assert stage["name"] in done.stdout
        assert stage["passed"] or (stage["skipped"] and stage["name"] == "sync")


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """fault -> names of the failed stages. All faults share a model, its sequences and the processes."""
    config = load_config(CONFIG, ["--layout.world_size", "4", "--layout.tensor", "2", "--trainer.recompute", "full"])
    folder = tmp_path_factory.mktemp("check")
    with RankPool(4, folder / "ranks.log") as many, RankPool(1, folder / "ranks.log") as one:
        many.start(), one.start()
        subject, gradients = make_subject(folder, small_run(config, hf_config_of(config), expert_replicas=True))

        def failed(fault: str | None) -> list[str]:
            return [stage.name for stage in run_stages(subject, gradients, one, many, fault) if not stage.passed]

        yield failed


@pytest.mark.parametrize(
    ("fault", "stages"),
    [
        (None, []),
        ("swapped-gate-up", ["conversion", "forward"]),
        ("shifted-routes", ["replay"]),
        ("one-sided-temperature", ["replay"]),
        ("unreduced-expert-grad", ["layout"]),
    ],
)
def test_an_injected_fault_fails_in_its_stage(checked, fault, stages):
    found = checked(fault)
    # Weights that are wrong in Megatron are wrong in whatever is compared with transformers later, replay included.
    assert found[: len(stages)] == stages and (found == stages or fault == "swapped-gate-up")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--inject-fault", "gremlins"), "use one of swapped-gate-up"),
        (("--plant", "gremlins"), "use one of swapped-gate-up"),
        (("--model.architecture.num_experts", "7"), "num_experts = 7"),
        (("--model.architecture.model_type", "mamba9"), "mamba9"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_any_work(words, expected):
    done = CliRunner().invoke(app, ["check", str(CONFIG), "--no-server", *words])
    assert done.exit_code == 2 and expected in done.stderr, done.output
