"""Muon's rate follows AdamW's schedule."""

import pytest

from megatron_rl.config.sections import Muon, Optimizer
from megatron_rl.engine.optimizers.muon import muon_rates


def test_left_out_they_are_those_of_adamw() -> None:
    rates = muon_rates(Optimizer(name="muon", learning_rate=1e-3, weight_decay=0.1), 4e-4)
    assert (rates.learning_rate, rates.weight_decay) == (4e-4, 0.1)


def test_given_they_are_muons_own_on_the_same_schedule() -> None:
    section = Optimizer(name="muon", learning_rate=1e-3, weight_decay=0.1, muon=Muon(learning_rate=5e-3, weight_decay=0.0))
    rates = muon_rates(section, 4e-4)  # at two fifths of the peak
    assert rates.learning_rate == pytest.approx(2e-3) and rates.weight_decay == 0
