"""The sinks that a config enables."""

import sys
import types

import pytest

from megatron_rl.config import Config
from megatron_rl.config.folder import RunFolder
from megatron_rl.metrics import SinkError, Sinks, read_rows
from megatron_rl.metrics.examples import choose_examples


def config(tmp_path, **metrics) -> Config:
    run = {"name": "r", "steps": 3, "folder": tmp_path}
    return Config.model_validate({"run": run, "model": {"path": "/m"}, "task": {"name": "t"}, "metrics": metrics})


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.create(config(tmp_path))
    return folder


def test_rows_reach_the_files_and_the_console(tmp_path, folder, capsys):
    with Sinks(config(tmp_path), folder) as sinks:
        sinks.write(0, {"loss": 3.0}, phase="supervised")
        sinks.progress("supervised start", 1, 1, {"loss": 3.0})
        sinks.write(0, {"reward_mean": 0.5, "broken": float("nan")})
        sinks.say("weights sent")
    (row,) = read_rows(folder.metrics_file)
    assert row.values["reward_mean"] == 0.5 and row.seconds >= 0
    (events,) = folder.tensorboard.iterdir()
    data = events.read_bytes()
    assert b"reward_mean" in data and b"supervised/loss" in data and b"broken" not in data
    out = capsys.readouterr().out
    assert "step 1/3  reward 0.500" in out and "weights sent" in out


def test_tensorboard_can_be_left_out(tmp_path, folder):
    Sinks(config(tmp_path, tensorboard=False), folder).close()
    assert not folder.tensorboard.exists()


def test_wandb_that_is_not_installed_is_a_clear_error_at_set_up(tmp_path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SinkError, match=r"metrics\.wandb_project = 'p' needs the package wandb: pip install"):
        Sinks(config(tmp_path, wandb_project="p"), folder)


class FakeRun:
    """Stands for the service, which a test must not call."""

    def __init__(self, **options):
        self.options, self.rows, self.finished = options, [], False

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


def test_wandb_gets_the_rows_and_a_resumed_run_its_id(tmp_path, folder, monkeypatch):
    runs = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **o: runs.append(FakeRun(**o)) or runs[-1]))
    for step in (0, 1):
        with Sinks(config(tmp_path, wandb_project="p"), folder) as sinks:
            sinks.write(step, {"reward_mean": 0.5})
    first, second = runs
    assert first.options["project"] == "p" and first.options["id"] == second.options["id"] and first.finished
    assert first.rows == [{"step": 0, "reward_mean": 0.5}] and second.rows == [{"step": 1, "reward_mean": 0.5}]
    assert first.options["config"]["run"]["name"] == "r"


EXAMPLES = [{"prompt": f"{n}+1=", "completion": f"[{n + 1}]", "reward": float(n), "finish": "stop"} for n in (2, 0, 1, 4, 3)]


def test_examples_can_be_read(tmp_path, folder):
    with Sinks(config(tmp_path, examples_per_step=2), folder) as sinks:
        sinks.examples(12, EXAMPLES)
        sinks.examples(13, [])
    (path,) = folder.examples.iterdir()
    assert path.name == "step_000012.txt"
    assert path.read_text() == (
        "=== reward 4  finish stop\n--- prompt\n4+1=\n--- completion\n[5]\n\n"
        "=== reward 0  finish stop\n--- prompt\n0+1=\n--- completion\n[1]\n"
    )


def test_examples_are_chosen_from_the_best_to_the_worst():
    assert [e["reward"] for e in choose_examples(EXAMPLES, 3)] == [4, 2, 0]
    assert [e["reward"] for e in choose_examples(EXAMPLES, 9)] == [4, 3, 2, 1, 0]
    assert choose_examples(EXAMPLES, 0) == choose_examples([], 3) == []
    assert [e["reward"] for e in choose_examples(EXAMPLES, 1)] == [4]
