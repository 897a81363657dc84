"""What slurm/ offers to copy works with this program.

Profiles make a batch script, job scripts call commands and options that exist.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_rl.launch.cli import app

ROOT = Path(__file__).parents[3]
PROFILES = sorted((ROOT / "slurm" / "profiles").glob("*.toml"))
JOBS = sorted((ROOT / "slurm" / "jobs").iterdir())
CONFIGS = {"cpu": ["model_configs/tiny-moe-cpu.toml"]}
GPU_CONFIG = ["model_configs/qwen3-30b-a3b.toml", "--slurm.rollouts.nodes", "4"]
EXPECTED = {
    "modules": ["#SBATCH --account=lab", "#SBATCH --qos=normal", "module load cuda", "/shared/venvs/megatron-rl/bin/python"],
    "pyxis": ["--container-image=/shared/images/megatron-rl.sqsh", "/shared/hf:/shared/hf", "#SBATCH --gpus-per-node=8"],
    "two-partitions": ["#SBATCH --partition=training", "#SBATCH --partition=inference", "#SBATCH --constraint=l40s"],
    "no-gres": ["#SBATCH --partition=gpu"],
    "cpu": ["#SBATCH --partition=cpu"],
}
NOT_EXPECTED = {"no-gres": ["--gpus-per-node", "--exclusive"], "cpu": ["--gpus-per-node"]}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_makes_a_batch_script(tmp_path, monkeypatch, profile):
    monkeypatch.chdir(ROOT)
    words = [*CONFIGS.get(profile.stem, GPU_CONFIG), "--profile", str(profile), "--dry-run", "--run.folder", str(tmp_path)]
    result = CliRunner().invoke(app, ["launch", *words])
    assert result.exit_code == 0, result.output
    assert all(line in result.stdout for line in EXPECTED[profile.stem]), result.stdout
    assert not any(word in result.stdout for word in NOT_EXPECTED.get(profile.stem, ()))
    assert subprocess.run(["bash", "-n"], input=result.stdout, text=True, capture_output=True, check=False).stderr == ""


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_a_job_script_calls_commands_and_options_that_exist(script):
    text = script.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""
    calls = re.findall(r"^\s*megatron-rl (.*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
    assert calls
    for call in calls:
        command, words = typer.main.get_command(app), shlex.split(call)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, call


def test_the_readme_names_every_file():
    readme = (ROOT / "slurm" / "README.md").read_text()
    assert all(f"`{path.name}`" in readme for path in (*PROFILES, *JOBS))
