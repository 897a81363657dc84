"""Intervals are measured by a clock that never jumps; the wall clock only dates what a person reads."""

import ast

from tests.architecture.source import package_modules

# Of a row of metrics; of status.json, which another machine reads.
MAY_READ_THE_WALL_CLOCK = {"metrics/rows.py", "metrics/tensorboard.py", "launch/status.py", "launch/run_control.py"}
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}


def test_only_what_dates_something_reads_the_wall_clock() -> None:
    found = [
        f"{module.place}:{node.lineno}: {ast.unparse(node)} jumps when the clock is set; use time.monotonic"
        for module in package_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in WALL_CLOCKS
        if module.place.removeprefix("megatron_rl/") not in MAY_READ_THE_WALL_CLOCK
    ]
    assert not found, "\n".join(found)
