"""The steps from which a run can be rerun; other requests are refused before anything starts."""

from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, RunFolder, load_config
from megatron_rl.launch.replay import replay_run
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
