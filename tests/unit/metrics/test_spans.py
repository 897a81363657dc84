"""The span timer, by a clock that the test moves."""

import pytest

from megatron_rl.metrics import spans as module
from megatron_rl.metrics.spans import Spans


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_blocks_of_one_name_add_up_and_an_outer_one_counts_the_inner(clock):
    spans = Spans()
    with spans("step"):
        for seconds in (1.0, 2.5):
            with spans("assemble"):
                clock[0] += seconds
        clock[0] += 4.0
    assert (spans["assemble"], spans["step"], spans["score"]) == (3.5, 7.5, 0.0)


def test_a_block_that_fails_is_counted(clock):
    spans = Spans()
    with pytest.raises(ZeroDivisionError), spans("update"):
        clock[0] += 2.0
        1 / 0  # noqa: B018 - it is to raise
    assert spans["update"] == 2.0
