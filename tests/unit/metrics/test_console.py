"""What is shown: one line a step where there is no terminal, a display that is redrawn where there is one."""

import io

import pytest
from rich.console import Console

from megatron_rl.metrics import Row
from megatron_rl.metrics.console import Eta, LiveDisplay, PlainDisplay, clock, open_display, shown

VALUES = {
    "reward_mean": 0.25,
    "entropy_keep_set": 0.875,
    "mismatch_kl_k1": 1.25e-7,
    "staleness_mean": 1.5,
    "singleton_share": 0.43,
    "trainer_tokens_per_s": 1234.5,
    "rollout_tokens_per_s": 980.2,
}


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, _environ={})


def text_of(where: Console) -> str:
    return where.file.getvalue()


def test_no_terminal_gives_one_line_a_step(monkeypatch):
    where = console(terminal=False)
    display = open_display("run", 40, where)
    assert isinstance(display, PlainDisplay)
    display.step(Row(0, VALUES, seconds=50.0))
    display.step(Row(1, VALUES, seconds=2.0))
    display.close()
    first, second = text_of(where).splitlines()
    assert first.startswith("step 1/40  reward 0.250  entropy 0.875  mismatch 1.2e-07  staleness 1.50  singletons 43%")
    assert second.endswith("trainer tok/s 1234  rollout tok/s 980  2.0 s  ETA 1:16")  # 38 steps of 2 s; the start-up is left out


def test_in_ci_a_terminal_is_treated_like_a_file(monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert isinstance(open_display("run", 4, console(terminal=True)), PlainDisplay)
    monkeypatch.delenv("CI")
    live = open_display("run", 4, console(terminal=True))
    live.close()
    assert isinstance(live, LiveDisplay)


def test_the_live_display_shows_the_step_its_values_and_the_first_ones():
    where = console(terminal=True)
    display = LiveDisplay("tiny", 40, where)
    display.progress("supervised start", 3, 200, {"loss": 2.5})
    display.step(Row(0, VALUES, seconds=3.0))
    display.say("a server left [the fleet]")
    display.step(Row(1, VALUES | {"reward_mean": 0.75}, seconds=3.0))
    display.close()
    out = text_of(where)
    for part in ("tiny", "step 2 of 40", "0.750", "first 0.250", "a server left [the fleet]", "ETA 1:54"):
        assert part in out


def test_text_in_brackets_is_not_taken_for_markup():
    where = console(terminal=False)
    PlainDisplay(3, where).say("[bold]prompt[/bold] [/]")
    assert text_of(where) == "[bold]prompt[/bold] [/]\n"


def test_progress_is_said_at_each_tenth():
    where = console(terminal=False)
    display = PlainDisplay(3, where)
    for done in range(1, 201):
        display.progress("supervised start", done, 200, {"loss": 2.0})
    assert len(text_of(where).splitlines()) == 10
    assert text_of(where).splitlines()[-1] == "supervised start 200/200  loss 2"


def test_values_that_are_missing_or_no_numbers_do_not_break_the_line():
    assert shown({"reward_mean": float("nan"), "other": 1.0}) == [("reward", "nan")]
    assert shown({}) == []


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3700, "1:01:40")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_eta_never_falls_below_zero():
    eta = Eta(total_steps=3)
    assert [eta.after(Row(step, {}, seconds=2.0)) for step in (0, 1, 2, 3)] == [4.0, 2.0, 0.0, 0.0]
