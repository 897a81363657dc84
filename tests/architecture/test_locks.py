"""The lock files satisfy pyproject.toml: fails when a dependency was added without `bash scripts/lock.sh`."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source import REPOSITORY

LOCKS = sorted((REPOSITORY / "scripts" / "locks").glob("py*.txt"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_lock_satisfies_the_direct_dependencies(path: Path) -> None:
    """Direct dependencies only: pip's resolver chose the indirect ones."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["test"])]
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    locked = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}

    environment = {"python_version": path.stem.removeprefix("py")}
    needed = [requirement for requirement in wanted if requirement.marker is None or requirement.marker.evaluate(environment)]
    found = {requirement: locked.get(canonicalize_name(requirement.name)) for requirement in needed}
    wrong = [
        str(requirement) for requirement, version in found.items() if version is None or version not in requirement.specifier
    ]
    assert not wrong, f"{path.name} does not hold {wrong}: run `bash scripts/lock.sh {environment['python_version']}`"
