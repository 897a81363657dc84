"""The summary of a run, by hand."""

import io
import json

import pytest
from rich.console import Console

from megatron_rl.metrics import Row, print_summary, summarise_run, write_summary
from megatron_rl.metrics.rows import JsonLines


def row(step, **values):
    return Row(step, {name.replace("__", "/"): float(value) for name, value in values.items()}, seconds=2.0, time=100.0 + step)


def test_rewards_of_both_ends():
    summary = summarise_run([row(step, reward_mean=step) for step in range(25)])
    assert summary["reward_first10"] == 4.5 and summary["reward_last10"] == 19.5 and summary["steps"] == 25
    short = summarise_run([row(step, reward_mean=step) for step in range(4)])
    assert short["reward_first10"] == short["reward_last10"] == 1.5


def test_shares_are_weighted_by_what_they_are_shares_of():
    rows = [
        row(0, keep_set_coverage=1, singleton_share=0.5, num_loss_tokens=10, num_tokens=30, num_rollouts=2, routing_coverage=1),
        row(
            1, keep_set_coverage=0.5, singleton_share=0.2, num_loss_tokens=30, num_tokens=60, num_rollouts=4, routing_coverage=0.9
        ),
    ]
    summary = summarise_run(rows)
    assert summary["keep_set_coverage"] == pytest.approx((10 + 15) / 40)
    assert summary["singleton_share"] == pytest.approx((5 + 6) / 40)
    assert summary["routing_coverage"] == pytest.approx((30 + 54) / 90)
    assert summary["num_tokens"] == 90 and summary["tokens_per_s"] == 90 / 4.0


def test_full_coverage_is_exactly_one():
    rows = [row(step, keep_set_coverage=1, num_loss_tokens=n) for step, n in enumerate((3, 7, 1001))]
    assert summarise_run(rows)["keep_set_coverage"] == 1.0


def test_the_probes_speak_for_equal_weights_and_the_training_batches_for_themselves():
    rows = [
        row(0, probe__abs_dlogp_mean=1e-7, probe__ratio_mean=1.0, probe__num_loss_tokens=10, abs_dlogp_mean=0.1, ratio_mean=0.9),
        row(1, abs_dlogp_mean=0.3, ratio_mean=1.1),  # no probe after this step
        row(2, probe__abs_dlogp_mean=4e-7, probe__ratio_mean=1.5, probe__num_loss_tokens=20, probe__abs_dlogp_max=2e-6),
    ]
    summary = summarise_run(rows)
    assert summary["abs_dlogp_mean"] == pytest.approx(3e-7) and summary["ratio_mean"] == pytest.approx(4 / 3)
    assert summary["abs_dlogp_max"] == 2e-6
    assert summary["train_abs_dlogp_mean"] == pytest.approx(0.2) and summary["train_ratio_mean"] == pytest.approx(1.0)


def test_the_bytes_of_an_update():
    rows = [row(0, sync_bytes=4096), row(1), row(2, sync_bytes=4096)]  # no server was updated before the second step
    assert summarise_run(rows)["sync_bytes"] == 4096


def test_staleness_overhead_and_times():
    rows = [
        row(0, staleness_mean=0, staleness_max=0, num_rollouts=8, overhead_share=0.1, step_s=1),
        row(1, staleness_mean=2, staleness_max=3, num_rollouts=8, overhead_share=0.02, step_s=3),
    ]
    summary = summarise_run(rows, supervised=[Row(0, {}, "supervised", seconds=5.0)])
    assert summary["staleness_mean"] == 1 and summary["staleness_max"] == 3
    assert summary["overhead_share"] == pytest.approx(0.04)
    assert summary["wall_time_s"] == 9.0


def test_what_was_not_measured_is_left_out():
    assert summarise_run([]) == {"steps": 0, "wall_time_s": 0, "num_tokens": 0}
    assert "abs_dlogp_mean" not in summarise_run([row(0, reward_mean=1)])


def test_written_and_printed(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for r in [
        row(0, reward_mean=0.25),
        row(1, reward_mean=0.5),
        row(1, reward_mean=0.75),
        row(0, probe__ratio_mean=float("nan")),
    ]:
        sink.write(r)
    sink.close()
    summary = write_summary(tmp_path / "metrics.jsonl", tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["steps"] == 2 and written["reward_last10"] == summary["reward_last10"] == 0.75
    assert written["ratio_mean"] is None  # a NaN is said, as null
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=80))
    assert "reward_last10" in out.getvalue() and "0.75" in out.getvalue()
