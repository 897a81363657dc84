"""Writes and verifies scripts/locks/gpu-py3.12.txt: what `setup.sh --gpu` installs. Run by `bash scripts/lock.sh gpu`.

uv resolves for Linux on x86_64 and Python 3.12 without installing, so a machine without a GPU can do it. `--verify` has uv
resolve the lock itself, which has to give the lock again. `--verify --download FOLDER` also has pip download each file that the
lock names as for that machine (4.4 GB, kept in FOLDER; nothing is installed), and checks what each says of itself: version,
Python, dependencies, and of the source packages what they need to be built.
"""

import argparse
import ast
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

LOCKS = Path(__file__).resolve().parent
REPOSITORY = LOCKS.parent.parent
LOCK = LOCKS / "gpu-py3.12.txt"
PYTHON = "3.12"
EXTRAS = ("gpu", "gpu-deterministic", "test")

COMPILED_PACKAGES = ("flash-attn", "transformer-engine-torch")
"""Have no wheel on PyPI, and are compiled against torch and CUDA at installation (scripts/setup.sh --gpu)."""

SOURCE_PACKAGES = ("cellpylib", "pycosat", "zss")
"""Have no wheel on PyPI either, and need no torch: pip builds each in an environment of its own. pycosat needs a C compiler."""

GLIBC = (2, 35)
"""Of the machine that pip downloads for: Ubuntu 22.04's. `needed_glibc` is what scripts/setup.sh asks for."""

ENVIRONMENT = {
    "implementation_name": "cpython", "os_name": "posix", "platform_machine": "x86_64",
    "platform_python_implementation": "CPython", "platform_system": "Linux", "python_full_version": "3.12.0",
    "python_version": PYTHON, "sys_platform": "linux", "extra": "",
}  # fmt: skip
"""Markers of the machine that the lock is for."""

HEADER = (
    "# Made by scripts/lock.sh gpu for Linux on x86_64, Python 3.12, CUDA 13; do not edit. To be installed by\n"
    "# scripts/setup.sh --gpu, which compiles the source packages of it last."
)

UV = ("uv", "pip", "compile", "--quiet", "--python-version", PYTHON, "--python-platform", "linux", "--no-header", "--no-annotate")

PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], 4, -1)),
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64",
)  # fmt: skip
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps")
PIP_WHEELS = (
    *PIP, "--only-binary", ":all:", "--no-binary", ",".join(SOURCE_PACKAGES), "--python-version", PYTHON,
    *(word for platform in PLATFORMS for word in ("--platform", platform)),
)  # fmt: skip
PIP_COMPILED = (*PIP, "--no-binary", ":all:", "--no-build-isolation")

STAND_IN_FOR_TORCH = {
    "__init__.py": "from torch import version\n__version__ = '2.14.0'\n",
    "version.py": "cuda, hip = '13.0', None\n",
    "utils/__init__.py": "",
    "utils/cpp_extension.py": (
        "from setuptools import Extension\n"
        "from setuptools.command.build_ext import build_ext as BuildExtension\n"
        "CUDA_HOME = ROCM_HOME = IS_HIP_EXTENSION = None\n"
        "def CppExtension(name, sources, **_): return Extension(name, [str(source) for source in sources])\n"
        "CUDAExtension = CppExtension\n"
    ),
}
"""pip runs the setup.py of a source package before it downloads it, for its name and version; the compiled packages import torch
there and ask for its CUDA. Nothing is compiled."""


def main() -> None:
    """Write the lock, or verify it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of those of the present lock")
    parser.add_argument("--verify", action="store_true", help="write nothing; resolve the lock and compare")
    parser.add_argument(
        "--download", type=Path, metavar="FOLDER", help="with --verify: download each file and check its metadata"
    )
    arguments = parser.parse_args()
    if not arguments.verify:
        write(resolve(upgrade=arguments.upgrade))
        return
    locked = read_lock()
    wrong = closure_differences(locked)
    if arguments.download:
        download(locked, arguments.download)
        wrong += file_faults(locked, arguments.download)
        print(f"oldest glibc that all wheels run on: {'.'.join(map(str, needed_glibc(arguments.download)))}")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{LOCK.relative_to(REPOSITORY)}: {len(locked)} packages, {'downloaded and ' if arguments.download else ''}verified")


def write(versions: dict[str, str]) -> None:
    """The lock file of these versions."""
    LOCK.write_text("\n".join([HEADER, *(f"{name}=={version}" for name, version in sorted(versions.items()))]) + "\n")
    print(f"{LOCK.relative_to(REPOSITORY)}: {len(versions)} packages")


def resolve(*, upgrade: bool) -> dict[str, str]:
    """Versions by canonical name. uv keeps those of the present lock where they fit, as it finds them in its output file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        if LOCK.exists() and not upgrade:
            out.write_text(LOCK.read_text())
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        run([*UV, str(REPOSITORY / "pyproject.toml"), str(LOCKS / "gpu.in"), *extras, "--output-file", str(out)])
        return versions_of(out.read_text())


def closure_differences(locked: dict[str, str]) -> list[str]:
    """What uv adds, drops or changes when it resolves the lock's own lines: a dependency that the lock lacks shows here."""
    with tempfile.TemporaryDirectory() as folder:
        listed, out = Path(folder) / "listed.in", Path(folder) / "out.txt"
        listed.write_text("".join(f"{name}=={version}\n" for name, version in locked.items()))
        run([*UV, str(listed), "--output-file", str(out)])
        found = versions_of(out.read_text())
    names = sorted({*found, *locked})
    return [f"{n}: the lock has {locked.get(n)}, its closure {found.get(n)}" for n in names if found.get(n) != locked.get(n)]


def download(locked: dict[str, str], folder: Path) -> None:
    """The files that pip would install on the machine that the lock is for; what is there already is not downloaded again."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        listed, torch = Path(scratch) / "listed.txt", Path(scratch) / "stand_in" / "torch"
        listed.write_text("".join(f"{name}=={version}\n" for name, version in locked.items() if name not in COMPILED_PACKAGES))
        run([*PIP_WHEELS, "--dest", str(folder), "--requirement", str(listed)])
        for name, text in STAND_IN_FOR_TORCH.items():
            (torch / name).parent.mkdir(parents=True, exist_ok=True)
            (torch / name).write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(torch.parent), "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        run([*PIP_COMPILED, "--dest", str(folder), *(f"{name}=={locked[name]}" for name in COMPILED_PACKAGES)], environment)


def file_faults(locked: dict[str, str], folder: Path) -> list[str]:
    """Hold what each downloaded file says of itself against the lock."""
    wheels = {path: wheel_metadata(path) for path in sorted(folder.glob("*.whl"))}
    archives = [path for path in sorted(folder.iterdir()) if path.name.endswith((".tar.gz", ".zip"))]
    faults = [fault for metadata in wheels.values() for fault in metadata_faults(metadata, locked)]
    faults += [fault for path in archives for fault in source_faults(path, locked)]
    there = {canonicalize_name(metadata["Name"]) for metadata in wheels.values()}
    there |= {canonicalize_name(path.name.rpartition("-")[0]) for path in archives}
    faults += [f"{name}: not downloaded" for name in sorted(locked.keys() - there)]
    return faults + [f"{name}: downloaded, and not in the lock" for name in sorted(there - locked.keys())]


def wheel_metadata(path: Path) -> Message:
    """METADATA of a wheel. zipfile also finds out here whether the file was cut off."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        return email.message_from_bytes(archive.read(name))


def needed_glibc(folder: Path) -> tuple[int, int]:
    """The oldest glibc for all wheels, by their names; of a wheel for several, its oldest."""
    needed = {(2, 17)}
    for path in folder.glob("*.whl"):
        tags = {tag.platform for tag in parse_wheel_filename(path.name)[3]}
        versions = [tuple(map(int, found.groups())) for tag in tags if (found := re.match(r"manylinux_(\d+)_(\d+)_", tag))]
        if versions and "any" not in tags and not any(tag.startswith(("manylinux1_", "manylinux20")) for tag in tags):
            needed.add(min(versions))
    return max(needed)


def metadata_faults(metadata: Message, locked: dict[str, str]) -> list[str]:
    """Where a package's own words contradict the lock."""
    name, version = canonicalize_name(metadata["Name"]), metadata["Version"]
    faults = []
    if version.partition("+")[0] != locked.get(name, "").partition("+")[0]:
        faults.append(f"{name}: the file is of version {version}, the lock has {locked.get(name)}")
    if f"{PYTHON}.0" not in SpecifierSet(metadata["Requires-Python"] or ""):
        faults.append(f"{name}: needs Python {metadata['Requires-Python']}")
    return faults + unmet(name, [Requirement(line) for line in metadata.get_all("Requires-Dist", [])], locked)


def source_faults(archive: Path, locked: dict[str, str]) -> list[str]:
    """Build requirements (pyproject.toml, setup_requires, imports of setup.py) that the lock does not meet."""
    with tarfile.open(archive) as tar:
        texts = {
            member.name.split("/", 1)[1]: tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar.getmembers()
            if member.isfile() and member.name.count("/") == 1 and member.name.endswith((".toml", "/setup.py", "/PKG-INFO"))
        }
        own = {member.name.split("/")[1].removesuffix(".py") for member in tar.getmembers() if "/" in member.name}
    about = email.message_from_string(texts["PKG-INFO"])
    build = tomllib.loads(texts.get("pyproject.toml", ""))
    requirements = [Requirement(line) for line in build.get("build-system", {}).get("requires", [])]
    requirements += [Requirement(name) for name in build_imports(texts.get("setup.py", "")) - own]
    return metadata_faults(about, locked) + unmet(archive.name, requirements, locked)


def build_imports(setup_py: str) -> set[str]:
    """Packages, other than Python's, that a setup.py imports or asks for by setup_requires."""
    tree = ast.parse(setup_py)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.keyword) and node.arg == "setup_requires" and isinstance(node.value, ast.List):
            found |= set(ast.literal_eval(node.value))
    return found - set(sys.stdlib_module_names) - {"distutils"}  # distutils: setuptools has it


def unmet(who: str, requirements: list[Requirement], locked: dict[str, str]) -> list[str]:
    """Requirements, of those that hold on the lock's platform, that the lock does not satisfy. pip is in every environment."""
    here = [r for r in requirements if r.name != "pip" and (r.marker is None or r.marker.evaluate(ENVIRONMENT))]
    return [
        f"{who}: needs {r}, and the lock has {locked.get(canonicalize_name(r.name))}"
        for r in here
        if (version := locked.get(canonicalize_name(r.name))) is None or not r.specifier.contains(version, prereleases=True)
    ]


def read_lock() -> dict[str, str]:
    """Versions by canonical name."""
    return versions_of(LOCK.read_text())


def versions_of(text: str) -> dict[str, str]:
    """Of lines such as name==version."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run uv of this environment, or pip; they print themselves what is wrong."""
    program = Path(sys.executable).with_name("uv") if command[0] == "uv" else Path(command[0])
    if subprocess.run([str(program), *command[1:]], env=environment, check=False).returncode:
        sys.exit("see above; if the present lock stands in the way, run `bash scripts/lock.sh gpu --upgrade`.")


if __name__ == "__main__":
    main()
