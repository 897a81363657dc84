"""Arms of an experiment side by side, by hand."""

import io
import math

import pytest
from rich.console import Console

from megatron_rl.metrics import Row, arms_table, measure_run


def run(num_steps: int = 30, **values):
    """Rows whose values are functions of the step; without one, a value is not there."""
    return [Row(step, {name: value(step) for name, value in values.items()}) for step in range(num_steps)]


def printed(arms) -> dict[str, list[str]]:
    """First cell of each row to the others."""
    text = io.StringIO()
    Console(file=text, width=250).print(arms_table(arms))
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.getvalue().splitlines() if line.strip()
    ]
    return {first: rest for first, *rest in rows}


def test_both_ends_of_a_run_are_its_outer_quarters():
    measured = measure_run(
        run(reward_mean=float, abs_dlogp_max=lambda step: 1.0 / (step + 1), singleton_share=lambda step: step % 2)
    )
    assert measured["reward, first quarter"] == 3.0 and measured["reward, last quarter"] == 26.0  # seven of thirty steps
    assert measured["largest abs Δ log p, first quarter"] == 1.0 and measured[
        "largest abs Δ log p, last quarter"
    ] == pytest.approx(1 / 24)
    assert measured["singleton share"] == 0.5
    assert "entropy, keep-sets, first quarter" not in measured


def test_an_arm_is_the_mean_and_the_standard_deviation_over_its_runs():
    arms = {"one": [run(reward_mean=lambda _, r=r: r) for r in (0.1, 0.2, 0.6)], "two": [run(reward_mean=lambda _: 0.5)]}
    table = printed(arms)
    assert table["runs"] == ["3", "1"]
    assert table["reward, last quarter"] == ["0.3 ± 0.26", "0.5"]  # the variance is (.04 + .01 + .09) / 2


def test_an_arm_without_runs_or_without_a_value_says_so():
    table = printed({"full": [run(entropy_full=lambda _: 1.25)], "cut": [run(entropy_keep_set=lambda _: 0.75)], "failed": []})
    assert table["runs"] == ["1", "1", "0"]
    assert table["entropy, full vocabulary, first quarter"] == ["1.25", "-", "-"]
    assert table["entropy, keep-sets, first quarter"] == ["-", "0.75", "-"]


@pytest.mark.parametrize(("name", "words"), [("mismatch_kl_k3", "KL k3"), ("abs_dlogp_max", "largest abs Δ log p")])
def test_a_run_whose_numbers_ran_away_is_not_left_out_in_silence(name, words):
    sound, broken = run(**{name: lambda _: 2.0}), run(**{name: lambda step: math.nan if step == 25 else 2.0})
    table = printed({"arm": [sound, broken]})
    assert table[f"{words}, first quarter"] == ["2 ± 0"]
    assert table[f"{words}, last quarter"] == ["2 (1 of 2)"]
