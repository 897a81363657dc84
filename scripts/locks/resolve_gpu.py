"""Writes and verifies scripts/locks/gpu-py3.12.txt: what `setup.sh --gpu` installs. Run by `bash scripts/lock.sh gpu`.

uv resolves for Linux on x86_64 and Python 3.12 without installing, so a machine without a GPU can do it. `--verify` has uv
resolve the lock itself, which has to give the lock again. `--verify --download` also downloads each file that the lock names and
unpacks the wheels into a temporary folder (TMPDIR; about 25 GB), and checks what each says of itself: version, Python,
dependencies, and of the source packages what they import to be built.
"""

import argparse
import ast
import email
import json
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LOCKS = Path(__file__).resolve().parent
REPOSITORY = LOCKS.parent.parent
LOCK = LOCKS / "gpu-py3.12.txt"
PYTHON = "3.12"
EXTRAS = ("gpu", "gpu-deterministic", "test")

SOURCE_PACKAGES = ("flash-attn", "transformer-engine-torch")
"""Have no wheel on PyPI, and are compiled against torch and CUDA at installation (scripts/setup.sh --gpu)."""

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
UV_INSTALL = (
    "uv", "pip", "install", "--no-config", "--no-cache", "--no-deps", "--python-version", PYTHON,
    "--python-platform", "linux",
)  # fmt: skip


def main() -> None:
    """Write the lock, or verify it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of those of the present lock")
    parser.add_argument("--verify", action="store_true", help="write nothing; resolve the lock and compare")
    parser.add_argument("--download", action="store_true", help="with --verify: download each file and check its metadata")
    arguments = parser.parse_args()
    if not arguments.verify:
        write(resolve(upgrade=arguments.upgrade))
        return
    locked = read_lock()
    wrong = closure_differences(locked)
    if arguments.download:
        wrong += file_faults(locked)
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


def file_faults(locked: dict[str, str]) -> list[str]:
    """Download everything, unpack the wheels as on the machine that the lock is for, and hold each against the lock."""
    with tempfile.TemporaryDirectory() as folder:
        wheels, target = Path(folder) / "wheels.txt", Path(folder) / "target"
        wheels.write_text("".join(f"{n}=={v}\n" for n, v in locked.items() if n not in SOURCE_PACKAGES))
        run([*UV_INSTALL, "--target", str(target), "--requirement", str(wheels)])
        infos = [email.message_from_bytes(path.read_bytes()) for path in target.glob("*.dist-info/METADATA")]
        faults = [fault for metadata in infos for fault in metadata_faults(metadata, locked)]
        there = {canonicalize_name(metadata["Name"]) for metadata in infos}
        faults += [f"{name}: not unpacked" for name in sorted(locked.keys() - there - set(SOURCE_PACKAGES))]
        for name in SOURCE_PACKAGES:
            faults += source_faults(download_source(name, locked[name], Path(folder)), locked)
    return faults


def download_source(name: str, version: str, folder: Path) -> Path:
    """The source archive. pip would run its setup.py for the metadata, which needs torch and CUDA; hence a plain file."""
    request = urllib.request.Request(
        f"https://pypi.org/simple/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request) as answer:
        files = json.load(answer)["files"]
    (found,) = (f for f in files if f["filename"].endswith(f"-{version}.tar.gz"))
    path, _ = urllib.request.urlretrieve(found["url"], folder / found["filename"])
    return Path(path)


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
            if member.name.count("/") == 1 and member.name.endswith((".toml", "/setup.py"))
        }
    build = tomllib.loads(texts.get("pyproject.toml", ""))
    requirements = [Requirement(line) for line in build.get("build-system", {}).get("requires", [])]
    return unmet(archive.name, [*requirements, *(Requirement(n) for n in build_imports(texts["setup.py"]))], locked)


def build_imports(setup_py: str) -> set[str]:
    """Third-party packages that a setup.py imports or asks for by setup_requires."""
    tree = ast.parse(setup_py)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.keyword) and node.arg == "setup_requires":
            found |= set(ast.literal_eval(node.value))
    return {
        name for name in found if name not in sys.stdlib_module_names and name != "build_tools"
    }  # build_tools: in the archive


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


def run(command: list[str]) -> None:
    """Run uv of this environment; it prints the conflict itself."""
    program = Path(sys.executable).with_name(command[0])
    if subprocess.run([str(program), *command[1:]], check=False).returncode:
        sys.exit("uv found no solution; if the present lock stands in the way, run `bash scripts/lock.sh gpu --upgrade`.")


if __name__ == "__main__":
    main()
