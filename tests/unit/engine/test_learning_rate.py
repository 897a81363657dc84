"""The learning rate is a function of the step."""

import pytest

from megatron_rl.config.sections import Optimizer
from megatron_rl.engine.learning_rate import learning_rate


def rates(decay: str, *, total: int = 7, **settings: float) -> list[float]:
    section = Optimizer(learning_rate=1.0, decay=decay, **settings)
    return [learning_rate(section, step, total) for step in range(total)]


def test_warm_up_then_constant() -> None:
    assert rates("constant", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1])


def test_linear_decay_reaches_the_minimum_at_the_last_step() -> None:
    assert rates("linear", warmup_steps=2, min_learning_rate=0.2) == pytest.approx([1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_is_halfway_in_the_middle() -> None:
    found = rates("cosine", min_learning_rate=0.5)
    assert (found[0], found[3], found[6]) == pytest.approx((1.0, 0.75, 0.5))
    assert found == sorted(found, reverse=True)


def test_beyond_the_last_step_the_minimum_stays() -> None:
    section = Optimizer(learning_rate=1.0, min_learning_rate=0.1, decay="linear")
    assert learning_rate(section, 20, 7) == pytest.approx(0.1)


def test_a_run_of_one_step_has_the_peak() -> None:
    assert rates("cosine", total=1) == [1.0]
