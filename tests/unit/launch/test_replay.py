"""The steps from which a run can be rerun; other requests are refused before anything starts."""

import sys
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, RunFolder, load_config
from megatron_rl.launch.replay import first_cause, replay_run
from megatron_rl.processes import Child, Command
from megatron_rl.trainer import recorded_run
from megatron_rl.trainer.recorded_run import starting_steps

CONFIG = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create(load_config(CONFIG))
    for step in (2, 4, 6):
        folder.checkpoint(step).mkdir()
    (folder.checkpoints / ".step_000003.part").mkdir()
    return folder


def test_a_run_begins_at_its_start_and_at_complete_checkpoints_that_a_recorded_step_follows(run):
    assert starting_steps(run, recorded=[1, 2, 3, 4, 5]) == [2, 4]
    run.supervised_seal.write_text("{}")  # until then the supervised start is not complete
    assert starting_steps(run, recorded=[0, 1, 2, 3, 4, 5]) == [0, 2, 4]


@pytest.mark.parametrize(
    ("first", "steps", "message"),
    [
        (3, None, "can be rerun from 2, 4"),
        (0, None, "can be rerun from 2, 4"),
        (4, 3, "there are 2 recorded steps in a row; ask for 1 to 2"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_what_can(run, monkeypatch, first, steps, message):
    monkeypatch.setattr(recorded_run, "recorded_steps", lambda folder: [0, 1, 2, 4, 5])
    with pytest.raises(ConfigError, match=message):
        replay_run(run, [], first, steps, print)
    assert not run.replays.exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        replay_run(RunFolder(tmp_path / "nothing"), [], 0, None, print)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_of_ranks_that_failed_the_one_that_was_not_left_alone_is_shown(first_to_end, tmp_path):
    left, cause = "RuntimeError: Connection closed by peer [127.0.0.1]", "step_000002: a tensor of rank 0 is not what was saved"
    texts = [left, cause] if first_to_end == 0 else [cause, left]

    def rank(number: int, text: str) -> Child:
        program = f"import time; time.sleep({0.3 * number}); print({text!r}); raise SystemExit(1)"
        return Child(Command(f"replay-{number}", [sys.executable, "-c", program], tmp_path / f"replay-{number}.log"))

    ranks = [rank(number, text) for number, text in enumerate(texts)]
    assert cause in first_cause(ranks, wait_s=60)
    assert left in first_cause(ranks[texts.index(left) :][:1])
