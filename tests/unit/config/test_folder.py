"""The run's folder: what may be started, what resumed, and which checkpoint is the latest whole one."""

import stat

import pytest

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.folder import RunFolder, check_startable, run_folder


@pytest.fixture
def config(tmp_path):
    sections = {"run": {"name": "r", "steps": 3, "folder": tmp_path}, "model": {"path": "/m"}, "task": {"name": "t"}}
    return Config.model_validate(sections)


def test_a_folder_keeps_its_configuration_and_is_private(config, tmp_path):
    folder = run_folder(config)
    assert folder.path == tmp_path / "r"
    folder.path.mkdir(mode=0o755)  # made by hand, before
    folder.create(config)
    assert folder.config() == config
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_run_is_neither_overwritten_nor_resumed_from_nothing(config):
    folder = run_folder(config)
    check_startable(folder, resume=False)
    with pytest.raises(ConfigError, match="no run to resume"):
        check_startable(folder, resume=True)
    folder.create(config)
    check_startable(folder, resume=True)
    with pytest.raises(ConfigError, match="--resume"):
        check_startable(folder, resume=False)


def test_checkpoints_are_ordered_by_step_and_half_written_ones_passed_over(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.latest_checkpoint() is None
    for name in ("step_000009", "step_000010", "step_1000000", "step_000011.part", ".step_000012"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert [step for step, _ in folder.whole_checkpoints()] == [9, 10, 1000000]
    assert folder.latest_checkpoint() == (1000000, folder.checkpoint(1000000))
