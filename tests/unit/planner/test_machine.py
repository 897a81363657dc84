"""Machines of one's own, and collectives by where their ranks lie."""

from pathlib import Path

import pytest

from megatron_rl.planner import MachineError, known_machines, machine_named
from megatron_rl.planner.collectives import Group, exchange_seconds, ring_seconds
from megatron_rl.planner.machine import to_toml


def written(folder: Path, text: str) -> Path:
    file = folder / "machines.toml"
    file.write_text(text)
    return file


def test_a_machine_that_starts_from_another(tmp_path: Path) -> None:
    mine = machine_named("mine", written(tmp_path, '[mine]\nbase = "h200"\nnetwork_gb_s = 25\n'))
    assert (mine.network_gb_s, mine.memory_gib) == (25, machine_named("h200").memory_gib)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for machine in known_machines().values():
        assert machine_named(machine.name, written(tmp_path, to_toml(machine))) == machine


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[mine]\nmemory_gib = 80\n", "has no"),
        ('[mine]\nbase = "h300"\n', "h300"),
        ('[mine]\nbase = "h200"\nhbm = 3\n', "unknown hbm"),
        ('[mine]\nbase = "h200"\nhbm_gb_s = -3\n', "0 or more"),
        ("mine = 3\n", "is not a table"),
        ("[mine\n", "TOML"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(MachineError, match=rule):
        machine_named("mine", written(tmp_path, text))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(MachineError, match="h100, h200"):
        machine_named("h300")


def test_inside_a_node_is_faster_than_across() -> None:
    h200, size = machine_named("h200"), 1e9
    assert ring_seconds(h200, Group(8, 1), size) < ring_seconds(h200, Group(8, 8), size) / 5
    assert exchange_seconds(h200, Group(8, 1), size) < exchange_seconds(h200, Group(32, 1), size) / 5
    assert ring_seconds(h200, Group(1, 1), size) == exchange_seconds(h200, Group(1, 1), size) == 0


def test_a_ring_over_whole_nodes_uses_all_their_cards() -> None:
    h200 = machine_named("h200")
    assert ring_seconds(h200, Group(16, 1), 8e9) == pytest.approx(ring_seconds(h200, Group(16, 8), 8e9) / 8, rel=0.02)
