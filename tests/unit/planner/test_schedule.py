"""The schedules are Megatron's: their order, what is in flight, and how long they take."""

import pytest

from megatron_rl.planner.activations import chunks_in_flight
from megatron_rl.planner.schedule import Pass, order_of, pipeline_seconds, timeline


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(1, 1, 3), (3, 1, 7), (4, 1, 2), (2, 2, 4), (4, 3, 8), (4, 2, 4)])
def test_every_pass_runs_once_and_backward_after_forward(pp: int, vpp: int, microbatches: int) -> None:
    for stage in range(pp):
        order = order_of(stage, pp, vpp, microbatches)
        assert len(order) == len(set(order)) == 2 * vpp * microbatches
        for number, what in enumerate(order):
            if what.backward:
                assert Pass(False, what.microbatch, what.chunk) in order[:number]


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(3, 1, 7), (4, 1, 2), (2, 2, 4), (4, 3, 8)])
def test_what_is_in_flight(pp: int, vpp: int, microbatches: int) -> None:
    for stage in range(pp):
        most = flying = 0
        for what in order_of(stage, pp, vpp, microbatches):
            flying += -1 if what.backward else 1
            most = max(most, flying)
        assert most == chunks_in_flight(pp, vpp, stage, microbatches)


def test_one_forward_one_backward_by_hand() -> None:
    """Two stages, three microbatches: the second stage alternates, the first is one forward pass ahead."""
    f, b = (lambda n: Pass(False, n, 0)), (lambda n: Pass(True, n, 0))
    assert order_of(0, 2, 1, 3) == [f(0), f(1), b(0), f(2), b(1), b(2)]
    assert order_of(1, 2, 1, 3) == [f(0), b(0), f(1), b(1), f(2), b(2)]


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(1, 1, 5), (4, 1, 12), (2, 2, 8), (4, 4, 16)])
def test_the_formula_is_the_timeline_where_stages_are_alike(pp: int, vpp: int, microbatches: int) -> None:
    forward, backward = 1.0, 2.0
    spans = timeline(pp, vpp, microbatches, lambda *_: forward / vpp, lambda *_: backward / vpp, 0.0)
    followed = max(span.end for span in spans)
    assert pipeline_seconds([forward + backward] * pp, vpp, microbatches, 0.0) == pytest.approx(followed, rel=1e-9)


def test_a_slow_stage_sets_the_pace() -> None:
    spans = timeline(3, 1, 20, lambda stage, _: 2.0 if stage == 1 else 1.0, lambda stage, _: 4.0 if stage == 1 else 2.0, 0.1)
    followed = max(span.end for span in spans)
    # The formula fills and drains once; passes that wait for a message in between are not in it.
    assert pipeline_seconds([3.0, 6.0, 3.0], 1, 20, 0.1) == pytest.approx(followed, rel=0.05)
