"""Every prompt drawn ends in exactly one state."""

import json
import random

import pytest

from megatron_rl.orchestrator.ledger import Draw, Ledger, LedgerError, LengthHistogram


def test_states_of_a_prompt():
    ledger = Ledger(max_attempts=2)
    assert ledger.draw() == Draw(0, 0) and ledger.draw() == Draw(1, 0)
    ledger.finish(1, [4, 5])
    assert ledger.outcome(0) == "sampling" and ledger.outcome(1) == "buffered"
    ledger.plan([1], step=3)
    assert ledger.trained(3) == 1
    assert ledger.outcome(1) == "trained at step 3"
    assert ledger.summary() == {
        "drawn": 2,
        "trained": 1,
        "dropped": 0,
        "in_flight": 1,
        "discarded_draws": 0,
        "kept_length_mean": 4.5,
        "discarded_length_mean": 0.0,
    }
    ledger.check()


def test_faults_are_bounded_and_the_prompt_is_sampled_again_first():
    ledger = Ledger(max_attempts=2)
    ledger.draw(), ledger.draw()
    assert ledger.discard(1, "contract", [30]) and ledger.discard(0, "server")
    assert [ledger.draw(), ledger.draw(), ledger.draw()] == [Draw(0, 1), Draw(1, 1), Draw(2, 0)]
    assert not ledger.discard(1, "reward")
    assert ledger.outcome(1) == "dropped: reward"
    assert ledger.dropped == {"reward": 1} and ledger.discarded == {"contract": 1, "server": 1, "reward": 1}
    assert ledger.discarded_lengths.mean == 30


def test_stale_and_interrupted_draws_are_not_the_prompts_fault():
    ledger = Ledger(max_attempts=1)
    ledger.draw()
    for attempt in range(1, 5):
        ledger.finish(0, [8])
        assert ledger.discard(0, "stale")
        assert ledger.draw() == Draw(0, attempt)
    assert ledger.interrupt() == 1 and ledger.draw() == Draw(0, 5)
    assert ledger.discarded_lengths.number == 4


def test_a_hopeless_prompt_is_dropped_at_once():
    ledger = Ledger(max_attempts=9)
    ledger.draw()
    assert not ledger.discard(0, "prompt")
    assert ledger.outcome(0) == "dropped: prompt"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda led: led.finish(0, [1]), "cannot finish prompt 0: it is 'trained at step 0'"),
        (lambda led: led.plan([0], 1), "cannot plan prompt 0: it is 'trained at step 0'"),
        (lambda led: led.discard(0, "stale"), "cannot discard prompt 0"),
        (lambda led: led.trained(0), "step 0 is reported as trained"),
        (lambda led: led.plan([1], 1), "it is 'sampling', not buffered"),
        (lambda led: led.finish(7, [1]), "prompt 7 was never drawn"),
    ],
)
def test_counting_twice_raises(action, message):
    ledger = Ledger(max_attempts=3)
    ledger.draw(), ledger.draw()
    ledger.finish(0, [1])
    ledger.plan([0], 0)
    ledger.trained(0)
    with pytest.raises(LedgerError, match=message):
        action(ledger)
    ledger.check()


def test_check_finds_a_lost_prompt():
    ledger = Ledger(max_attempts=3)
    ledger.draw()
    state = ledger.to_json()
    state["open"] = {}
    with pytest.raises(LedgerError, match="of 1 prompts"):
        Ledger.from_json(state, max_attempts=3)


def test_length_histogram_has_bins_of_powers_of_two():
    histogram = LengthHistogram()
    histogram.add([1, 2, 3, 4, 1000, 0])
    assert histogram.counts == [2, 2, 1, 0, 0, 0, 0, 0, 0, 1] and histogram.number == 6 and histogram.mean == 1010 / 6


@pytest.mark.parametrize("seed", range(10))
def test_simulated_run_adds_up_across_restarts(seed):
    rng = random.Random(seed)
    ledger = Ledger(max_attempts=3)
    sampling, buffered, planned, kept, discarded = [], [], [], 0, 0
    for moment in range(3000):
        action = rng.choice(["draw", "draw", "finish", "fail", "stale", "plan", "train", "restart"])
        if action == "draw" and ledger.in_flight < 60:
            sampling.append(ledger.draw().prompt_index)
        elif action == "finish" and sampling:
            index = sampling.pop(rng.randrange(len(sampling)))
            ledger.finish(index, [rng.randint(1, 50)])
            buffered.append(index)
        elif action == "fail" and sampling:
            ledger.discard(sampling.pop(), rng.choice(["contract", "reward", "server", "prompt"]), [rng.randint(1, 50)])
            discarded += 1
        elif action == "stale" and buffered:
            ledger.discard(buffered.pop(0), "stale")
            discarded += 1
        elif action == "plan" and len(buffered) >= 4:
            ledger.plan(buffered[:4], step=moment)
            planned.append(moment)
            del buffered[:4]
        elif action == "train" and planned:
            step = planned.pop(0)
            assert ledger.trained(step) == 4
            kept += 4
        elif action == "restart" and moment % 50 == 0:
            ledger = Ledger.from_json(json.loads(json.dumps(ledger.to_json())), max_attempts=3)
            assert ledger.interrupt() == len(sampling)
            sampling.clear()
        ledger.check()
        assert ledger.trained_prompts == kept == ledger.kept_lengths.number
        assert ledger.discarded_lengths.number == discarded
    assert ledger.drawn > 200 and ledger.dropped.total() > 0


def test_many_prompts_stay_small():
    ledger = Ledger(max_attempts=3)
    for step in range(25_000):
        indices = [ledger.draw().prompt_index for _ in range(8)]
        for index in indices:
            ledger.finish(index, [3])
        ledger.plan(indices, step)
        ledger.trained(step)
    ledger.check()
    assert ledger.drawn == 200_000 and ledger.outcome(199_999) == "trained at step 24999"
    assert len(json.dumps(ledger.to_json())) < 200_000
