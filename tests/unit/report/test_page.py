"""What the page holds, read back from it."""

import json
import re

import pytest

from megatron_rl.batching import Spool
from megatron_rl.config import RunFolder
from megatron_rl.errors import UserError
from megatron_rl.metrics import Row, write_summary
from megatron_rl.metrics.catalogue import PANELS, curves_of
from megatron_rl.metrics.rows import JsonLines
from megatron_rl.objective.ratio_quantiles import QUANTILES
from megatron_rl.orchestrator.ledger import Ledger
from megatron_rl.report import ReportError, write_report
from megatron_rl.report.figures import colours, figure
from megatron_rl.report.lengths import lengths_figure, read_lengths
from megatron_rl.report.rollouts import shown_rollouts
from tests.unit.report.run_folder import make_run


def no_remark(text: str) -> None:
    raise AssertionError(text)


def test_a_rollout_token_by_token(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    first, *_, last = shown_rollouts(folder, [1], no_remark)
    assert [first.uid, last.uid] == ["g1.0", "g1.2"] and first.prompt == "2 * 3=" and first.advantage == -1.0
    six, tool, seven = first.tokens
    assert (six.text, six.keep_set, six.set_size, six.version) == ("6", ("6", "7", "8"), 3, 4)
    assert six.trainer_logprob == pytest.approx(six.rollout_logprob + 0.25, abs=1e-6)
    assert (tool.text, tool.rollout_logprob, tool.trainer_logprob, tool.set_size) == ("=", None, None, 0)
    assert (seven.keep_set, seven.version) == (("7",), 5)
    assert len(six.routes) == 4 and all(len(layer) == 2 for layer in six.routes)


def test_routes_are_those_of_the_position_that_predicted_the_token(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    recorded = Spool(folder.path).payload("rollouts/g0.safetensors").rollout(0)
    (first, _) = shown_rollouts(folder, [0], no_remark)
    assert [token.routes for token in first.tokens] == [
        tuple(map(tuple, recorded.routed_experts[5 + place].tolist())) for place in range(3)
    ]


def test_several_runs_lie_side_by_side(tmp_path):
    folders = [make_run(tmp_path / name, steps=3, seed=seed) for seed, name in enumerate(("one", "two"))]
    write_report(folders, tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert page.count("reward_first10") == 1 and all(f'value="{name}">{name}</label>' in page for name in ("one", "two"))
    assert "src=" not in page.split("</script>")[-2], "nothing is loaded from elsewhere"
    rollouts = json.loads(re.search(r"const rollouts = (\{.*?\});\n", page)[1])
    assert {name: len(shown) for name, shown in rollouts.items()} == {"one": 6, "two": 6}


def test_the_summary_is_that_of_the_run(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    rows = JsonLines(folder.metrics_file)
    rows.write(Row(0, {"loss": 1.0}, "supervised", seconds=40.5))
    rows.close()
    write_report([folder], tmp_path / "out.html")
    summary = write_summary(folder.metrics_file, folder.summary_file)
    assert summary["wall_time_s"] == 49.5  # the supervised start with the three steps
    assert re.search(r"wall_time_s</\w+>\s*<td[^>]*>49\.5<", (tmp_path / "out.html").read_text())


def test_what_a_rollout_says_cannot_leave_its_place(tmp_path):
    write_report([make_run(tmp_path / "run", steps=1, text="</script><b>")], tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "</script><b>" not in page and "\\u003c/script>\\u003cb>" in page


def test_lengths_of_what_was_trained_and_of_what_was_thrown_away(tmp_path):
    folders = [make_run(tmp_path / name, steps=2) for name in ("one", "two")]
    ledger = Ledger(max_attempts=1)
    ledger.kept_lengths.add([1, 5, 6, 9])
    ledger.discarded_lengths.add([3])
    for step in (1, 2):
        folders[0].checkpoint(step).mkdir()
    (folders[0].checkpoint(2) / "orchestrator.json").write_text(json.dumps({"ledger": ledger.to_json()}))
    drawn = lengths_figure({folder.path.name: read_lengths(folder, no_remark) for folder in folders})  # two has no checkpoint
    trained, discarded = drawn.data
    assert (trained.name, discarded.name) == ("one: trained, 4", "one: discarded, 1")
    assert (trained.x, trained.y) == (("1", "2-3", "4-7", "8-15"), (0.25, 0.0, 0.5, 0.25)) and discarded.y == (0.0, 1.0)
    assert lengths_figure({"two": read_lengths(folders[1], no_remark)}) is None
    write_report(folders, tmp_path / "out.html")
    assert "Lengths of completions" in (tmp_path / "out.html").read_text()


def test_the_ratio_is_drawn_as_the_trainer_measured_it(tmp_path):
    (panel,) = [panel for panel in PANELS if panel.title.startswith("Ratio")]
    assert {"ratio_mean", *QUANTILES} == set(curves_of(panel))


def test_a_thousand_steps_fit(tmp_path):
    assert write_report([make_run(tmp_path / "run", steps=1000)], tmp_path / "out.html").num_bytes < 10e6


def test_what_is_damaged_is_said_and_costs_no_more_than_itself(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    for path in (folder.scores_file(0), Spool(folder.path).path("rollouts/g1.safetensors")):
        path.write_bytes(path.read_bytes()[:20])
    assert [shown.step for shown in shown_rollouts(folder, [0, 1, 2], lambda text: None)] == [2, 2]
    lines = folder.metrics_file.read_bytes().splitlines(keepends=True)
    folder.metrics_file.write_bytes(
        b"".join([lines[0], b"[1, 2]\n", *lines[1:], b'{"phase": "tra'])
    )  # the last one is being written
    folder.checkpoint(3).mkdir()
    (folder.checkpoint(3) / "orchestrator.json").write_text("{bad")
    remarks = write_report([folder], tmp_path / "out.html").remarks
    assert [next(n for n, words in enumerate(SAID) if all(word in remark for word in words)) for remark in remarks] == [
        0,
        1,
        2,
        3,
    ], remarks


SAID = (
    ("metrics.jsonl", "1 lines", "line 2"),
    ("step_000003", "orchestrator.json", "lengths"),
    ("no rollouts of step 0",),
    ("no rollouts of step 1",),
)


def test_metrics_of_which_no_line_is_whole(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    endless = b'{"phase": "train", "step": 1e999, "seconds": 1, "time": 1}\n'
    folder.metrics_file.write_bytes(endless + b"[" * 100_000 + b"\n")
    with pytest.raises(UserError, match="no line is a complete row"):
        write_report([folder], tmp_path / "out.html")


def test_records_that_were_cleared_away_are_no_damage(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    Spool(folder.path).path(Spool.plan_name(0)).unlink()
    Spool(folder.path).path("rollouts/g1.safetensors").unlink()
    assert not list(shown_rollouts(folder, [0, 1], no_remark))
    assert write_report([folder], tmp_path / "out.html").remarks == ()


@pytest.mark.parametrize(
    ("name", "says"),
    [("config.toml", "ends in .html"), ("none/out.html", "no file can be written there"), ("folder.html", "no file can")],
)
def test_where_no_report_belongs(tmp_path, name, says):
    folder = make_run(tmp_path / "run", steps=1)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "config.toml").write_text("precious")
    with pytest.raises(UserError, match=says):
        write_report([folder], tmp_path / name)
    assert (tmp_path / "config.toml").read_text() == "precious"


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ReportError, match="there is no run in this folder"):
        write_report([RunFolder(tmp_path)], tmp_path / "out.html")
    folder = make_run(tmp_path / "run", steps=0)
    with pytest.raises(ReportError, match="has not finished a training step"):
        write_report([folder], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_runs_are_told_apart_by_colour_and_series_by_the_legend(tmp_path):
    """However many runs there are, a plot's legend has each series once."""
    rows = {f"run{number}": [Row(step, {"reward_mean": 0.5, "reward_std": 0.1}) for step in range(3)] for number in range(12)}
    (panel,) = [panel for panel in PANELS if panel.title == "Reward"]
    drawn = figure(panel, rows)
    assert [trace.name for trace in drawn.data if trace.showlegend] == ["mean", "standard deviation"]
    assert {trace.meta: trace.line.color for trace in drawn.data} == colours(rows) and len(set(colours(rows).values())) == 12
    assert drawn.data[2].hovertemplate.startswith("run1: mean, step")


def test_a_tokenizer_that_cannot_be_read_is_a_remark_and_ids_are_shown(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    (folder.model / "tokenizer.json").unlink(missing_ok=True)
    folder.model.mkdir(exist_ok=True)
    (folder.model / "tokenizer.json").write_text("{}")
    (remark,) = write_report([folder], tmp_path / "out.html").remarks
    assert "tokenizer.json: cannot be read as a tokenizer" in remark
    assert all(token.text.isdigit() for shown in shown_rollouts(folder, [0], lambda text: None) for token in shown.tokens)
