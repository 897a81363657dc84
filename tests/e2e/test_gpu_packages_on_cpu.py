"""`check --no-server` and `plan --measure` on a CPU, in an environment in which the GPU packages can be imported.

Once with stand-ins for all of them, whose import leaves a mark and fails; once with Transformer Engine's own Python modules, from
the wheel that the GPU lock names (pip downloads it), next to which Megatron-Core would take its fused code. Not proved here: an
environment in which Transformer Engine's compiled part is installed, too.

    pytest tests/e2e/test_gpu_packages_on_cpu.py -m slow
"""

import faulthandler
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.runs import CONFIG, PROGRAM, REPOSITORY
from tests.unit.engine.test_hidden_gpu_packages import installed  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def transformer_engine(tmp_path_factory) -> Path:
    """A folder for sys.path with the Python modules of the locked Transformer Engine."""
    folder = tmp_path_factory.mktemp("te")
    lock = (REPOSITORY / "scripts" / "locks" / "gpu-py3.12.txt").read_text()
    version = re.search(r"^transformer-engine==(.*)$", lock, re.MULTILINE)[1]
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*argv, f"transformer-engine=={version}"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformer-engine {version} cannot be downloaded: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    assert (folder / "unpacked" / "transformer_engine" / "pytorch" / "__init__.py").exists()
    return folder / "unpacked"


def call(packages: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(REPOSITORY)]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*PROGRAM, *words], env=environment, capture_output=True, text=True, timeout=3600, check=False)


@pytest.mark.parametrize("packages", ["installed", "transformer_engine"])
@pytest.mark.parametrize("words", [("check", str(CONFIG), "--no-server"), ("plan", str(CONFIG), "--measure")], ids=lambda w: w[0])
def test_nothing_of_them_is_used(packages, words, request, tmp_path):
    folder = request.getfixturevalue(packages)
    machines = ["--machines", str(tmp_path / "machines.toml")] if words[0] == "plan" else []
    faulthandler.cancel_dump_traceback_later()  # pytest's limit for a test that hangs: the planner measures for twenty minutes
    done = call(folder, *words, *machines)
    # 1 of the planner: its predictions are further off than it promises, as on a machine that does other work.
    assert done.returncode in ((0,) if words[0] == "check" else (0, 1)), done.stdout[-2000:] + done.stderr[-2000:]
    assert not (folder / "touched").exists(), (folder / "touched").read_text()
    said = done.stdout + done.stderr
    assert "layout" in said if words[0] == "check" else (tmp_path / "machines.toml").exists()
