"""Limits on the length of files and functions in the package, the tests and the scripts."""

import ast
from collections.abc import Callable

import pytest

from tests.architecture.conftest import REPORT
from tests.architecture.source import all_modules

LONG_FILE, LONGEST_FILE = 400, 600
LONG_FUNCTION, LONGEST_FUNCTION = 60, 100
"""Lines. What is above the first is listed in the report at the end of the run; above the second the test fails."""

NUM_REPORTED = 10


def file_sizes() -> list[tuple[int, str]]:
    """(lines, place) of every file."""
    return [(module.num_lines, module.place) for module in all_modules()]


def function_sizes() -> list[tuple[int, str]]:
    """(lines, place and name) of every function and method, without its decorators."""
    return [
        (node.end_lineno - node.lineno + 1, f"{module.place}:{node.lineno} {node.name}")
        for module in all_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize(
    ("what", "sizes", "long", "longest"),
    [("files", file_sizes, LONG_FILE, LONGEST_FILE), ("functions", function_sizes, LONG_FUNCTION, LONGEST_FUNCTION)],
)
def test_nothing_is_too_long(
    what: str, sizes: Callable[[], list[tuple[int, str]]], long: int, longest: int, request: pytest.FixtureRequest
) -> None:
    measured = sorted(sizes(), reverse=True)
    lines = [f"{size:5d} lines  {place}" for size, place in measured[:NUM_REPORTED] if size > long]
    request.config.stash[REPORT].append((f"longest {what} (over {long} lines)", lines or ["none"]))
    too_long = [f"{place}: {size} lines; {longest} is the most: divide it" for size, place in measured if size > longest]
    assert not too_long, "\n".join(too_long)
