"""Runs of the complete program at layouts and from folders that no other test uses; minutes each. Not proved here: that
they learn."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from safetensors.torch import load_file

from megatron_rl.config import RunFolder
from megatron_rl.conversion import make_random_model
from tests.e2e.test_train import CONFIG, REPOSITORY, train

pytestmark = pytest.mark.slow
CONTEXT = ["--layout.world_size", "4", "--layout.tensor", "2", "--layout.context", "2", "--layout.expert", "2"]


def megatron_rl(*words: object) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "megatron_rl.launch.cli", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600, cwd=REPOSITORY, check=False)


def assert_trained(folder: Path) -> None:
    """Two steps were made, and the servers' log-probs are the trainer's."""
    summary = json.loads(RunFolder(folder).summary_file.read_text())
    assert summary["steps"] == 2
    assert summary["keep_set_coverage"] == 1.0 and summary["routing_coverage"] == 1.0
    # fp32, sampled and scored at equal weights: what is left is rounding of another order of sums
    assert summary["abs_dlogp_mean"] < 1e-5 and abs(summary["ratio_mean"] - 1.0) < 1e-4


def test_a_run_with_context_parallelism(tmp_path: Path) -> None:
    done = train(tmp_path / "context", *CONTEXT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_trained(tmp_path / "context")


def test_check_with_context_parallelism(tmp_path: Path) -> None:
    done = megatron_rl("check", CONFIG, *CONTEXT, "--no-server", "--json", tmp_path / "check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["passed"] and report["layout"]["context"] == 2


def test_a_run_from_a_converted_checkpoint(tmp_path: Path) -> None:
    tree = tomllib.loads(CONFIG.read_text())
    make_random_model(tmp_path / "hf", tree["model"].pop("architecture") | {"num_hidden_layers": 2}, seed=0)
    converted = megatron_rl("convert", "hf-to-megatron", tmp_path / "hf", tmp_path / "megatron")
    assert converted.returncode == 0, converted.stderr
    tree["model"]["path"] = str(tmp_path / "megatron")
    tree["run"] |= {"name": "from-megatron", "folder": str(tmp_path), "steps": 2}
    tree["rollouts"] |= {"prompts_per_step": 4, "samples_per_prompt": 4}
    tree["supervised"]["steps"] = 0
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tree))
    done = megatron_rl("train", tmp_path / "run.toml")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_trained(tmp_path / "from-megatron")


def test_a_run_with_nvfp4_weights_on_both_sides(tmp_path: Path) -> None:
    """Servers hold the packed values that they were sent; the trainer's passes and the export of its checkpoint use the same."""
    done = train(tmp_path / "nvfp4", "--precision.training", "qat", "--precision.rollouts", "nvfp4")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_trained(tmp_path / "nvfp4")
    checkpoint, out = RunFolder(tmp_path / "nvfp4").latest_checkpoint(), tmp_path / "out"
    converted = megatron_rl("convert", "megatron-to-hf", checkpoint[1], out, "--quantize", "nvfp4")
    assert converted.returncode == 0, converted.stderr
    sent = sum(
        tensor.numel() * tensor.element_size() for file in out.glob("*.safetensors") for tensor in load_file(file).values()
    )
    assert json.loads(RunFolder(tmp_path / "nvfp4").summary_file.read_text())["sync_bytes"] == sent
