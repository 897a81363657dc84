"""Which files are in the repository, where, and under which name."""

import re
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, REPOSITORY, all_modules, tracked_files

ALLOWED_AT_TOP = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "docs", "mkdocs.yml", "model_configs", PACKAGE,
    "pyproject.toml", "scripts", "slurm", "tests",
}  # fmt: skip

# Names that do not say what belongs there, so that everything ends up there.
NAMELESS = {"util", "utils", "common", "helper", "helpers", "misc"}

# Folders of one machine. Written in two parts, or this file would hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w./~-])/(?:" + "|".join(("wor" + "k/", "roo" + "t/", "hom" + "e/", "tmp/en" + "v")) + ")")

# Tests of these kinds are laid out as the package is. Those of e2e/ and gpu/ may cross its units.
MIRRORING = ("unit", "distributed")


def tracked() -> tuple[Path, ...]:
    """Files that git tracks; skips the test outside a checkout."""
    files = tracked_files()
    if files is None:
        pytest.skip("this is no git checkout")
    return files


def test_top_level_holds_only_what_belongs_there() -> None:
    unexpected = sorted({path.parts[0] for path in tracked()} - ALLOWED_AT_TOP)
    assert not unexpected, f"{unexpected}: not at the top of the repository; allowed are {sorted(ALLOWED_AT_TOP)}"


def test_no_module_is_nameless() -> None:
    wrong = [module.place for module in all_modules() if NAMELESS & set(module.name.split("."))]
    assert not wrong, f"{wrong}: name what the module is about; {sorted(NAMELESS)} say nothing"


def test_no_file_names_a_folder_of_one_machine() -> None:
    wrong = []
    for path in tracked():
        text = (REPOSITORY / path).read_text(errors="replace")
        wrong += [
            f"{path}:{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if MACHINE_PATHS.search(line)
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", MIRRORING)
def test_tests_mirror_the_package(kind: str) -> None:
    """tests/unit/a/b/test_x.py is about megatron_rl/a/b/, or about a module megatron_rl/a/b.py."""
    root = REPOSITORY / "tests" / kind
    folders = {path.parent.relative_to(root) for path in root.rglob("test_*.py")}
    wrong = [str(folder) for folder in sorted(folders) if not mirrored(folder)]
    assert not wrong, f"tests/{kind}: no part of {PACKAGE} is named {wrong}"


def mirrored(folder: Path) -> bool:
    """Whether the package has this folder, or a module of this name; tests of the entire package are at the top."""
    part = REPOSITORY / PACKAGE / folder
    return part.is_dir() or part.with_suffix(".py").is_file()
