"""A process that computes on the CPU imports nothing of Transformer Engine and its kind, where they are installed.

The packages are stand-ins whose import leaves a mark and fails, with the metadata that an installed one has. Not proved here: the
absence of kernels in packages that Megatron-Core does not import.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.engine.cpu import _GPU_PACKAGES

REPOSITORY = Path(__file__).parents[3]

IN_A_RANK = """
import importlib.util, sys
import megatron_rl.engine.rank_imports
import torch
from megatron.core.extensions import transformer_engine as of_megatron
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import Adam
assert not of_megatron.HAVE_TE and not gpt_layer_specs.HAVE_TE
assert Adam.__module__.startswith("torch."), Adam
assert importlib.util.find_spec("transformer_engine") is None
assert not torch.cuda.is_available() and not torch.cuda.is_initialized()
"""


@pytest.fixture
def installed(tmp_path):
    """A folder for sys.path with all of these packages; importing one appends its name to `touched`, and raises."""
    for name in _GPU_PACKAGES:
        package = tmp_path / name
        package.mkdir()
        body = f"open({str(tmp_path / 'touched')!r}, 'a').write('{name} ')\nraise RuntimeError('{name} was imported on a CPU')\n"
        (package / "__init__.py").write_text(body)
        info = tmp_path / f"{name}-2.20.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 2.20.2\n")
    return tmp_path


def run(installed: Path, program: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": f"{installed}:{REPOSITORY}", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


def test_a_rank_on_the_cpu_touches_none_of_them(installed):
    done = run(installed, IN_A_RANK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (installed / "touched").exists(), (installed / "touched").read_text()


def test_the_stand_ins_are_found_where_they_are_not_hidden(installed):
    """Megatron-Core would import them, each version another one first: the test above looks at the right thing."""
    done = run(installed, "import megatron.core.extensions.transformer_engine")
    assert done.returncode != 0 and (installed / "touched").exists(), done.stderr[-2000:]
