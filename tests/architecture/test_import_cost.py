"""What a process loads when it imports a unit, seen from outside: each case is a fresh interpreter.

The rules on the source cannot see what a third-party package loads in turn; this can.
"""

import json
import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGE, REPOSITORY, package_modules

HEAVY = ("torch", "megatron", "vllm", "transformers")
LIGHT_UNITS = ("topology", "config", "records", "wire", "metrics", "tasks", "processes", "rollouts", "batching", "orchestrator")

# Imports the named modules in turn and prints which module loaded each forbidden package.
PROBE = """
import importlib, json, sys
names, forbidden = json.loads(sys.argv[1])
loaded_by = {}
for name in names:
    importlib.import_module(name)
    for package in forbidden:
        if package in sys.modules:
            loaded_by.setdefault(package, name)
print(json.dumps(loaded_by))
"""


def assert_not_loaded(names: list[str], forbidden: tuple[str, ...]) -> None:
    """Import the modules in a fresh interpreter; none of the forbidden packages may come with them."""
    command = [sys.executable, "-c", PROBE, json.dumps([names, forbidden])]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    loaded_by = json.loads(result.stdout.splitlines()[-1])
    assert not loaded_by, "\n".join(f"importing {name} loads {package}" for package, name in loaded_by.items())


def modules_of(unit: str) -> list[str]:
    """All modules of a unit, skipping the test where it does not exist; `__main__` modules run when imported."""
    names = [module.name for module in package_modules() if module.unit == unit and not module.name.endswith("__main__")]
    if not names:
        pytest.skip(f"there is no {PACKAGE}.{unit} yet")
    return names


@pytest.mark.parametrize("unit", LIGHT_UNITS)
def test_light_unit_loads_nothing_heavy(unit: str) -> None:
    assert_not_loaded(modules_of(unit), HEAVY)


def test_plugin_loads_no_megatron() -> None:
    """vLLM imports the plugin's package in each of its processes, at their start."""
    assert_not_loaded([f"{PACKAGE}.inference.vllm.plugin"], ("megatron",))


def test_command_line_starts_without_torch() -> None:
    """`megatron-rl --help` must answer at once; what a command needs is imported when it runs."""
    modules_of("launch")
    assert_not_loaded([f"{PACKAGE}.launch.cli"], HEAVY)
