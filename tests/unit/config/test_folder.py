"""The run's folder: what may be started, what resumed, and which checkpoint is the latest complete one."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from megatron_rl.config import Config, ConfigError, load_config
from megatron_rl.config.folder import RunFolder, check_own_config, check_startable, run_folder
from megatron_rl.config.resume import changes_on_resume


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


def test_a_folder_of_something_else_is_not_taken(config):
    folder = run_folder(config)
    with folder.claimed():
        check_startable(folder, resume=False)  # of which nothing but the lock is there
    (folder.path / "export").mkdir()
    with pytest.raises(ConfigError, match="holds no run, but export"):
        check_startable(folder, resume=False)


def test_two_programs_do_not_share_a_run(config):
    folder = run_folder(config)
    with folder.claimed(), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "), folder.claimed():
        pass
    with folder.claimed():
        pass  # the first one has left


def test_a_configuration_that_changes_keeps_the_former_beside_it(config):
    folder = run_folder(config)
    folder.create(config)
    folder.create(config)  # nothing changes
    folder.checkpoint(7).mkdir()
    changed = config.model_copy(update={"rollouts": config.rollouts.model_copy(update={"top_p": 0.5})})
    assert changes_on_resume(folder, changed) == [f"rollouts.top_p: {config.rollouts.top_p} -> 0.5"]
    folder.create(changed)
    assert folder.config() == changed and not changes_on_resume(folder, changed)
    kept = sorted(folder.path.glob("config.before_*"))
    assert [file.name for file in kept] == ["config.before_step_000007.toml"] and load_config(kept[0]) == config


def test_a_run_of_an_earlier_version_says_what_its_policy_reads_otherwise(config):
    folder = run_folder(config)
    folder.create(config)
    assert not changes_on_resume(folder, config)
    text = folder.config_file.read_text()
    former = [line for line in text.splitlines() if not line.startswith(("special_tokens", "former_text"))]
    folder.config_file.write_text("\n".join(former))
    said = changes_on_resume(folder, config)
    assert len(said) == 2 and "--task.special_tokens strip" in said[0] and "--task.former_text true" in said[1]
    task = config.task.model_copy(update={"special_tokens": "strip", "former_text": True})
    kept = changes_on_resume(folder, config.model_copy(update={"task": task}))
    assert kept == ["task.former_text: False -> True", "task.special_tokens: keep -> strip"]


def test_another_model_is_another_run(config):
    folder = run_folder(config)
    folder.create(config)
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": Path("/other")})})
    with pytest.raises(ConfigError, match="model.path: /m -> /other"):
        changes_on_resume(folder, other)


def test_a_copied_run_does_not_go_on_in_the_original(config, tmp_path):
    folder = run_folder(config)
    with folder.claimed():
        folder.create(config)
    check_own_config(folder.config_file, folder)
    shutil.copytree(folder.path, tmp_path / "copy")
    with pytest.raises(ConfigError, match=f"add --run.folder {tmp_path} --run.name copy"):
        check_own_config(tmp_path / "copy" / "config.toml", folder)
    check_own_config(tmp_path / "copy" / "config.toml", RunFolder(tmp_path / "copy"))


def test_checkpoints_are_ordered_by_step_and_half_written_ones_passed_over(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.latest_checkpoint() is None
    for name in ("step_000009", "step_000010", "step_1000000", "step_000011.part", ".step_000012"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert [step for step, _ in folder.complete_checkpoints()] == [9, 10, 1000000]
    assert folder.latest_checkpoint() == (1000000, folder.checkpoint(1000000))
