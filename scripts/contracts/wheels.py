"""The packages that a GPU machine installs: which versions, where their source is. Downloaded and unpacked, never installed."""

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_rl.errors import RunError

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "scripts" / "locks" / "gpu-py3.12.txt"
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")

WHEELS = ("vllm", "megatron-core", "transformer-engine", "nvidia-modelopt", "emerging-optimizers")
SOURCE_PACKAGE = "transformer-engine-torch"
"""The torch part of Transformer Engine; it has no wheel, and the version of transformer-engine."""

_CUDA_FOR_METADATA = 'import torch.version\ntorch.version.cuda = "13.0"\n'
"""The source package's setup.py asks torch for its CUDA version before it says anything of itself. torch on a machine without a
GPU has none, so pip runs with a sitecustomize.py that gives one. Nothing is built."""


class WheelError(RunError):
    """A package that could not be downloaded, or a pin that is missing."""


def pinned_versions() -> dict[str, str]:
    """Version of each package: from the GPU lock if there is one, otherwise from pyproject.toml's exact pins.

    Raises:
        WheelError: One of them is not pinned to one version.
    """
    if LOCK.exists():
        lines = [line.split("#")[0].strip() for line in LOCK.read_text().splitlines()]
        found = {
            canonicalize_name(name): version.split()[0] for name, _, version in (x.partition("==") for x in lines if "==" in x)
        }
    else:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["gpu"])]
        wanted = [r for r in wanted if r.marker is None or r.marker.evaluate({"python_version": PYTHON})]
        found = {canonicalize_name(r.name): str(r.specifier)[2:] for r in wanted if str(r.specifier).startswith("==")}
    missing = [name for name in WHEELS if name not in found]
    if missing:
        raise WheelError(f"no exact version of {', '.join(missing)} in {LOCK.name} or pyproject.toml; pin it with ==")
    return {name: found[name] for name in WHEELS} | {SOURCE_PACKAGE: found["transformer-engine"]}


def sources(versions: dict[str, str], cache: Path) -> dict[str, Path]:
    """The folder with each package's source, as it would be in site-packages; what is in the cache is not downloaded again.

    Args:
        versions: By package.
        cache: Takes the downloads, and what is unpacked from them: about 450 MB.
    """
    return {name: _unpacked(name, version, cache) for name, version in versions.items()}


def _unpacked(name: str, version: str, cache: Path) -> Path:
    folder = cache / f"{name}-{version}"
    if not folder.exists():
        file = _downloaded(name, version, cache)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            part = Path(scratch) / "source"
            if file.suffix == ".whl":
                with zipfile.ZipFile(file) as archive:
                    archive.extractall(
                        part, [entry for entry in archive.namelist() if entry.endswith(".py") or ".dist-info/" in entry]
                    )
            else:
                with tarfile.open(file) as archive:
                    archive.extractall(part, filter="data")
            part.rename(folder)
    return folder


def _downloaded(name: str, version: str, cache: Path) -> Path:
    folder = cache / "downloads" / f"{name}-{version}"
    if not (folder.exists() and any(folder.iterdir())):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), f"{name}=={version}"]
        with tempfile.TemporaryDirectory() as site:
            environment = dict(os.environ)
            if name == SOURCE_PACKAGE:
                (Path(site) / "sitecustomize.py").write_text(_CUDA_FOR_METADATA)
                environment["PYTHONPATH"] = site
                command += ["--no-binary", ":all:", "--no-build-isolation"]
            else:
                command += ["--only-binary", ":all:", "--python-version", PYTHON]
                command += [word for platform in PLATFORMS for word in ("--platform", platform)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            folder.rmdir()
            raise WheelError(f"{name} {version} could not be downloaded; pip says: {done.stderr.strip()[-600:]}")
    (file,) = folder.iterdir()
    return file
