"""The lines of `train --dry-run` on ranks: each rank, and of many ranks what they hold, with nobody left out."""

import re

import pytest

from megatron_rl.launch.local import _rank_lines
from megatron_rl.topology import Layout


def ranks_of(text: str) -> list[int]:
    return [n for first, last in re.findall(r"(\d+)(?:\.\.(\d+))?", text) for n in range(int(first), int(last or first) + 1)]


@pytest.mark.parametrize("layout", [Layout(64, tp=2, pp=4, ep=4), Layout(48, pp=3, cp=2, ep=8), Layout(64)])
def test_many_ranks_are_grouped_by_what_they_hold(layout: Layout) -> None:
    lines = _rank_lines(layout, 12, 16)
    stages, experts = lines[: layout.pp], lines[layout.pp :]
    assert len(experts) == layout.ep
    for group, size, coordinate in ((stages, layout.pp, "pp"), (experts, layout.ep, "ep")):
        found = {}
        for index, line in enumerate(group):
            name, held, ranks = re.fullmatch(r"(\w+ \d+): (?:layers|experts) ([\d.]+), ranks (.*)", line).groups()
            each = (12 if coordinate == "pp" else 16) // size
            assert name == f"{coordinate} {index}" and ranks_of(held) == list(range(index * each, (index + 1) * each))
            found |= dict.fromkeys(ranks_of(ranks), index)
        assert found == {rank: getattr(layout.coords_of(rank), coordinate) for rank in range(layout.world_size)}


def test_few_ranks_have_a_line_each_and_a_dense_model_no_experts() -> None:
    lines = _rank_lines(Layout(32, tp=2, pp=2, ep=4), 4, 8)
    assert len(lines) == 32
    assert lines[-1] == "rank 31: tp 1, cp 0, dp 7, pp 1, ep 3, layers 2..3, experts 6..7"
    assert _rank_lines(Layout(1), 4, 0) == ["rank 0: tp 0, cp 0, dp 0, pp 0, ep 0, layers 0..3"]
    assert len(_rank_lines(Layout(33), 4, 0)) == 1
