"""Numbers, worst tokens and verdicts from log-probs that are made up."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.attribution.effects import AS_TRAINED, LEFT, Attribution, attribution, measured
from megatron_rl.attribution.factors import Factor
from megatron_rl.attribution.scoring import Scoring, ScoringOutcome
from megatron_rl.attribution.table import print_attribution
from tests.unit.attribution.record import record

BASE = Scoring(routing_replay=True, keep_set_replay=True)
SHIFTED = Factor("shifted", replace(BASE, route_shift=1))
SWAPPED = Factor("swapped", replace(BASE, gate_up_swapped=True))
RECORD = record(stale=True)
TEXTS = [f"t{n}" for n in range(RECORD.num_tokens)]


def attributed(d: dict[str, np.ndarray], factors=(), hypotheses=(), outcome: ScoringOutcome | None = None) -> Attribution:
    scores = {name: RECORD.logprobs + of_one for name, of_one in d.items()}
    return attribution(
        RECORD, scores, factors, hypotheses, outcome or ScoringOutcome(), TEXTS, rounding=1e-4, recorded={}, notes=["a note"]
    )


def constant(value: float) -> np.ndarray:
    return np.full(RECORD.num_tokens, value)


def test_numbers_are_those_of_the_metrics() -> None:
    found = measured(np.array([0.5, -0.25, np.nan]))
    assert found.num_tokens == 2 and found.k1 == -0.125 and found.abs_mean == 0.375 and found.abs_max == 0.5
    assert found.ratio_mean == pytest.approx((np.e**0.5 + np.e**-0.25) / 2)
    assert found.k3 == pytest.approx(found.ratio_mean - 1 - 0.125)
    assert measured(np.array([np.nan])) is None


def test_a_change_accounts_for_what_it_takes_away_of_the_tokens_that_both_scored() -> None:
    half = np.where(RECORD.token < 20, 0.0, np.nan)
    factors = [Factor("helps", BASE), Factor("hurts", BASE), Factor("is not there", reason="no such thing")]
    found = attributed({AS_TRAINED: constant(-0.2), LEFT: constant(0.0), "helps": half, "hurts": constant(0.5)}, factors)
    assert [row.accounts_for for row in found.rows] == pytest.approx([0.2, -0.3, None])
    assert found.rows[0].mismatch.num_tokens == 20 and found.rows[2].reason == "no such thing"


def test_worst_tokens_say_what_explains_each() -> None:
    base = constant(0.01)
    base[[7, 30, 12]] = [3.0, -2.0, 1.0]
    fixed = base.copy()
    fixed[[7, 12]] = [0.1, 0.9]
    left = base.copy()
    left[[7, 30]] = [0.1, 0.0]
    found = attributed({AS_TRAINED: base, "replay on": fixed, LEFT: left}, [Factor("replay on", BASE)])
    seven, thirty, twelve = found.worst[:3]
    assert [t.token for t in found.worst[:3]] == [7, 30, 12] and seven.text == "t7" and seven.staleness == RECORD.staleness[7]
    # the first is taken by one change and by all together: the one is named
    assert [seven.explained_by, thirty.explained_by, twelve.explained_by] == ["replay on", "several together", "no single change"]
    assert [seven.share, thirty.share, twelve.share] == pytest.approx([2.9 / 3, 1, 0])
    assert seven.with_change == pytest.approx({AS_TRAINED: 3.0, "replay on": 0.1, LEFT: 0.1})


def test_a_change_that_helps_single_tokens_by_chance_explains_none() -> None:
    base, noisy = constant(0.2), constant(0.4)
    noisy[3] = 0.0
    found = attributed({AS_TRAINED: base, "noise": noisy, LEFT: base}, [Factor("noise", BASE)])
    assert {token.explained_by for token in found.worst} == {"no single change"}
    helps = {AS_TRAINED: base, "dropout": constant(0.01), LEFT: base}
    assert {token.explained_by for token in attributed(helps, [Factor("dropout", BASE, may_explain=False)]).worst} == {
        "no single change"
    }


def test_beside_a_fault_a_token_may_be_explained_by_what_else_is_undone() -> None:
    """The first token is mostly stale, the others are the fault's."""
    base, fresh = constant(0.3), constant(0.2)
    base[5], fresh[5] = 3.0, 0.2
    d = {AS_TRAINED: base, "staleness 0": fresh, LEFT: fresh, "swapped": constant(0.0)}
    first, *others = attributed(d, [Factor("staleness 0", BASE)], [SWAPPED]).worst
    assert first.explained_by == "staleness 0" and first.share == pytest.approx(2.8 / 3)
    assert {token.explained_by for token in others} == {"swapped"} and others[0].share == pytest.approx(2 / 3)


def test_the_fault_whose_undoing_leaves_least_is_named() -> None:
    d = {AS_TRAINED: constant(0.3), LEFT: constant(0.3), "shifted": constant(0.05), "swapped": constant(1e-6)}
    assert attributed(d, hypotheses=[SHIFTED, SWAPPED]).faults == ("swapped",)
    assert attributed(d | {"swapped": constant(0.2)}, hypotheses=[SHIFTED, SWAPPED]).faults == ("shifted",)
    assert attributed(d | {"swapped": constant(0.2), "shifted": constant(0.2)}, hypotheses=[SHIFTED, SWAPPED]).faults == ()


def test_where_only_rounding_is_left_nothing_is_named() -> None:
    d = {AS_TRAINED: constant(1e-5), LEFT: constant(1e-5), "swapped": constant(0.0)}
    assert attributed(d, hypotheses=[SWAPPED]).faults == ()


def test_the_row_that_a_shift_of_routes_lost_is_not_held_against_it() -> None:
    """The last token of each sequence has no row to go back to."""
    undone = np.where(RECORD.is_last, 4.0, 0.0)
    assert attributed({AS_TRAINED: constant(0.3), LEFT: constant(0.3), "shifted": undone}, hypotheses=[SHIFTED]).faults == (
        "shifted",
    )


def test_gradients_that_differ_name_their_fault() -> None:
    d = {AS_TRAINED: constant(0.0), LEFT: constant(0.0)}
    expert = "decoder.layers.0.mlp.experts.linear_fc1.weight3"
    found = attributed(d, outcome=ScoringOutcome(unequal_gradients=(expert,), num_gradients=9)).faults
    assert len(found) == 1 and found[0].startswith("experts' gradients are not summed") and "1 of 9" in found[0]
    found = attributed(d, outcome=ScoringOutcome(unequal_gradients=(expert, "embedding"), num_gradients=9)).faults
    assert found[0].startswith("some gradients")


def test_it_is_printed_and_written() -> None:
    d = {AS_TRAINED: constant(0.3), LEFT: constant(0.3), "shifted": constant(0.0)}
    factors = [Factor("quantisation [off]", reason="neither side"), Factor("routes", BASE)]
    found = attributed(d | {"routes": constant(0.6)}, factors, [SHIFTED])
    out = io.StringIO()
    print_attribution(found, Console(file=out, width=160))
    for expected in (
        "quantisation [off]: not applicable: neither side",
        "adds 0.3",
        "0.3 (100%)",
        "FOUND: shifted",
        "a note",
        "'t0'",
    ):
        assert expected in out.getvalue(), out.getvalue()
    tree = json.loads(json.dumps(found.as_json()))
    assert tree["faults"] == ["shifted"] and tree["rows"][0]["mismatch"] is None and tree["worst"][0]["explained_by"] == "shifted"
