"""A checkpoint that is not what was written is named and renamed, and the one before it is used."""

import json
import shutil

import pytest

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator import RunState, restore
from megatron_rl.orchestrator.checkpoints import BrokenCheckpointError, read_checkpoint, seal_checkpoint

CONFIG = Config.model_validate({"run": {"name": "t", "steps": 6}, "model": {"path": "/m"}, "task": {"name": "t"}})


def write(folder: RunFolder, step: int) -> RunState:
    """As a run does, with a trainer's part of two files, and a state that has drawn `step` prompts."""
    state = RunState.new(CONFIG)
    for _ in range(step):
        state.begin("http://s", 0)
    staging = folder.checkpoints / f".step_{step:06d}.part"
    (staging / "engine").mkdir(parents=True)
    (staging / "engine" / "__0_0.distcp").write_bytes(bytes(1000 + step))
    (staging / "engine" / "common.pt").write_bytes(b"common")
    seal_checkpoint(staging, folder.checkpoint(step), step, state)
    return state


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(CONFIG)
    return folder


def cut(file, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])


def flip_a_digit(file) -> None:
    text = file.read_text()
    assert '"drawn": 4' in text
    file.write_text(text.replace('"drawn": 4', '"drawn": 5'))


BREAKS = {
    "no orchestrator.json": (lambda f: (f / "orchestrator.json").unlink(), r"orchestrator\.json: cannot be read \(No such file"),
    "half orchestrator.json": (lambda f: cut(f / "orchestrator.json", 0.5), r"orchestrator\.json: not a complete state"),
    "empty orchestrator.json": (
        lambda f: cut(f / "orchestrator.json", 0.0),
        r"orchestrator\.json: not a complete state of a run",
    ),
    "another digit": (
        lambda f: flip_a_digit(f / "orchestrator.json"),
        r"orchestrator\.json: its content differs from what was written",
    ),
    "half tensors": (
        lambda f: cut(f / "engine" / "__0_0.distcp", 0.5),
        r"step_000004: engine/__0_0\.distcp has 502 bytes; 1004 were written",
    ),
    "no tensors": (lambda f: shutil.rmtree(f / "engine"), r"engine/__0_0\.distcp has no bytes"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_taken(folder, kind):
    write(folder, 2)
    write(folder, 4)
    broken, message = BREAKS[kind]
    broken(folder.checkpoint(4))
    with pytest.raises(BrokenCheckpointError, match=message):
        read_checkpoint(folder.checkpoint(4), CONFIG)
    messages = []
    state, step = restore(CONFIG, folder, messages.append)
    assert step == 2 and state.ledger.drawn == 2
    assert "renamed to broken_step_000004, and the checkpoint before it is used" in messages[0]
    assert folder.latest_checkpoint() == (2, folder.checkpoint(2))  # what the trainer's ranks take
    assert (folder.checkpoints / "broken_step_000004").is_dir()  # nothing is thrown away


def test_a_complete_checkpoint_restores_its_state(folder):
    written = write(folder, 3)
    messages = []
    state, step = restore(CONFIG, folder, messages.append)
    assert step == 3 and not messages
    assert {**state.ledger.stages()} == {"waiting": 3} and written.ledger.drawn == state.ledger.drawn


def test_where_no_checkpoint_is_complete_the_run_begins_at_its_start(folder):
    write(folder, 2)
    cut(folder.checkpoint(2) / "orchestrator.json", 0.9)
    messages = []
    state, step = restore(CONFIG, folder, messages.append)
    assert (step, state.ledger.drawn, len(messages)) == (0, 0, 1)


def test_a_checkpoint_that_was_copied_elsewhere_is_still_complete(folder, tmp_path):
    write(folder, 2)
    shutil.copytree(folder.path, tmp_path / "copy")
    assert restore(CONFIG, RunFolder(tmp_path / "copy"), pytest.fail)[1] == 2
    assert json.loads((tmp_path / "copy/checkpoints/step_000002/orchestrator.json").read_text())["files"]["engine/common.pt"] == 6
