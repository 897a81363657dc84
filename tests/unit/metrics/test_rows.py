"""metrics.jsonl: one whole line a step, readable by any JSON reader, also after crashes and resumes."""

import json
import math

import pytest

from megatron_rl.metrics import Row, read_rows, series
from megatron_rl.metrics.rows import JsonLines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, *rows):
    sink = JsonLines(path)
    for row in rows:
        sink.write(row)
    sink.close()


def test_round_trip(path):
    rows = [Row(0, {"a": 0.1 + 0.2}, seconds=1.5, time=100.0), Row(1, {"a": 1e-30, "b/c": -2.0}, seconds=2.0, time=102.0)]
    write(path, *rows)
    assert read_rows(path) == rows
    assert series(read_rows(path), "b/c") == [-2.0]


def test_a_line_is_on_disk_as_soon_as_it_is_written(path):
    sink = JsonLines(path)
    sink.write(Row(0, {"a": 1.0}))
    assert len(read_rows(path)) == 1
    sink.close()


def test_of_a_step_done_twice_the_last_counts(path):
    """Case 17: a resumed run appends to the file, from the step of its checkpoint."""
    write(path, *(Row(step, {"a": float(step)}) for step in range(5)))
    write(path, *(Row(step, {"a": 10.0 + step}) for step in (3, 4, 5)))
    assert [(row.step, row.values["a"]) for row in read_rows(path)] == [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_cut_by_a_crash_costs_only_itself(path, cut):
    write(path, Row(0, {"a": 0.0}), Row(1, {"a": 1.0}))
    path.write_bytes(path.read_bytes()[:-cut])
    assert [row.step for row in read_rows(path)] == ([0, 1] if cut == 1 else [0])  # 1: only the newline was cut
    write(path, Row(2, {"a": 2.0}))
    assert [row.step for row in read_rows(path)][-1] == 2
    assert len(read_rows(path)) == (3 if cut == 1 else 2)


def test_phases_are_kept_apart(path):
    write(path, Row(0, {"loss": 3.0}, phase="supervised"), Row(0, {"loss": 1.0}))
    assert [row.values["loss"] for row in read_rows(path)] == [1.0]
    assert [row.values["loss"] for row in read_rows(path, "supervised")] == [3.0]


def test_numbers_that_json_lacks_are_null_and_read_as_nan(path):
    write(path, Row(0, {"nan": math.nan, "inf": math.inf, "one": 1.0}))
    strict = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict["nan"] is None and strict["inf"] is None
    values = read_rows(path)[0].values
    assert math.isnan(values["nan"]) and math.isnan(values["inf"]) and values["one"] == 1.0


def test_foreign_lines_are_passed_over(path):
    path.write_text('[1, 2]\n"text"\n{"step": 1}\n\n7\n')
    assert read_rows(path) == []
