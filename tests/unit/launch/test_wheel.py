"""The package works from a wheel, without the repository.

Its data files are in it, and `launch` prints the batch script from elsewhere.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An empty folder with nothing but the package, installed from its wheel, which is built from a copy.

    Building writes into the sources.
    """
    sources, wheels, target = (tmp_path_factory.mktemp(name) for name in ("sources", "wheels", "target"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "megatron_rl", sources / "megatron_rl", ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(sources))
    (wheel,) = wheels.glob("*.whl")
    pip("install", "--no-deps", "--no-compile", "--target", str(target), str(wheel))
    return target


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def data_files(package: Path) -> set[str]:
    return {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_data_file(installed):
    assert data_files(installed / "megatron_rl") == data_files(ROOT / "megatron_rl")
    assert {"launch/job.sbatch.jinja", "planner/machines.toml", "report/page.html.jinja"} <= data_files(installed / "megatron_rl")


def test_launch_prints_the_batch_script_from_the_wheel(installed, tmp_path):
    shutil.copy(ROOT / "model_configs" / "tiny-moe-cpu.toml", tmp_path / "run.toml")
    program = (
        "import sys, megatron_rl.launch.cli as cli, megatron_rl.launch.submit as submit\n"
        "print(cli.__file__, submit.TEMPLATE, file=sys.stderr)\n"
        "cli.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", program, "launch", "run.toml", "--dry-run", "--run.folder", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split()[:2] == [
        str(installed / "megatron_rl" / "launch" / "cli.py"),
        str(installed / "megatron_rl" / "launch" / "job.sbatch.jinja"),
    ]
    assert done.stdout.startswith("#!/bin/bash\n") and "-m megatron_rl.launch.slurm_job" in done.stdout
