"""Routing replay changes what it should and nothing else; parity under every schedule, routes included, is in test_parity."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import Setting, evaluate
from tests.distributed.engine.oracle import expected
from tests.distributed.engine.replay_cases import (
    gradients_after_other_work,
    gradients_with_newest_first,
    refused_routes,
    scores_with,
)
from tests.distributed.engine.test_parity import GRADIENT, assert_same_gradients, assert_same_scores, relative_differences

IN_FLIGHT = Setting(layout=Layout(4, pp=4), recompute="full", max_tokens=19, multiple_of=20)
"""Several microbatches, of one length and each with different routes, in flight on every stage but the last."""


def test_without_replay_the_router_chooses(one: RankPool) -> None:
    found, wanted = one.run(evaluate, Setting(routing_replay=False))[0], expected("qwen3_moe", routing_replay=False)
    assert_same_scores(found.log_probs, wanted.log_probs)
    assert_same_gradients(found.gradients, wanted.gradients)
    forced = expected("qwen3_moe")
    assert max(np.abs(values - forced.log_probs[number]).max(initial=0) for number, values in found.log_probs.items()) > 0.1


def test_a_selection_bias_chooses_on_every_stage(one: RankPool, four: RankPool) -> None:
    """Without replay: groups of experts and a bias that is not zero, in one process and with each layer on a separate stage."""
    free = Setting("deepseek_v3_moe", routing_replay=False)
    wanted, found = expected(free.model, routing_replay=False), one.run(evaluate, free)[0]
    assert_same_scores(found.log_probs, wanted.log_probs)
    assert_same_gradients(found.gradients, wanted.gradients)
    ranks = four.run(evaluate, replace(free, layout=Layout(4, pp=4)))
    assert_same_scores(ranks[0].log_probs, wanted.log_probs)
    assert_same_gradients(ranks[0].gradients, wanted.gradients)


def test_other_experts_give_other_values(one: RankPool) -> None:
    recorded, shifted = (one.run(scores_with, Setting(), shift)[0] for shift in (0, 1))
    assert_same_scores(recorded, expected("qwen3_moe").log_probs)
    assert max(np.abs(values - shifted[number]).max(initial=0) for number, values in recorded.items()) > 0.1


@pytest.mark.parametrize(
    "setting", [IN_FLIGHT, Setting(layout=Layout(4, pp=2, vpp=2, ep=2), recompute="selective")], ids=["pp4", "pp2 vpp2 ep2"]
)
def test_nothing_else_in_the_process_disturbs_it(four: RankPool, setting: Setting) -> None:
    assert_same_gradients(four.run(gradients_after_other_work, setting)[0], expected("qwen3_moe").gradients)


def test_routes_of_another_microbatch_would_show(four: RankPool) -> None:
    """Shows that the test above can fail: it depends on the order of the queue."""
    found = four.run(gradients_with_newest_first, IN_FLIGHT)[0]
    assert max(relative_differences(found, expected("qwen3_moe").gradients).values()) > 1000 * GRADIENT


def test_bad_routes_are_refused_before_anything_runs(one: RankPool) -> None:
    message, before, after = one.run(refused_routes, Setting(layout=Layout()))[0]
    assert "repeat one" in message and "a token goes to each of its experts once" in message
    assert all(np.array_equal(values, after[number]) for number, values in before.items())
