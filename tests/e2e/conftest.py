"""The run that several tests look into."""

import fcntl
from pathlib import Path

import pytest

from megatron_rl.config import RunFolder
from tests.e2e.runs import processes_of, run, train_command

LONGEST = ("test_slurm.py", "test_kill.py", "test_train.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that two processes of tests end at about the same time."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, worker_id) -> RunFolder:
    """A supervised start and three steps at EP 2, with checkpoints before steps 2 and 3. Not to be changed.

    Test processes that run side by side (pytest-xdist) share it: the first that needs it makes it, the others wait.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    folder = shared / "runs" / "recorded"
    finished = shared / "recorded_is_finished"
    with open(shared / "recorded.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            _record(folder)
            finished.touch()
    return RunFolder(folder)


def _record(folder: Path) -> None:
    words = [
        "--run.steps",
        "3",
        "--supervised.steps",
        "4",
        "--supervised.batch_size",
        "8",
        "--model.architecture.num_hidden_layers",
        "2",
    ]
    done = run(train_command(folder, *words))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(processes_of(folder))
