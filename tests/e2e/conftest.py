"""The run that several tests look into."""

import pytest

from megatron_rl.config import RunFolder
from tests.e2e.runs import processes_of, run, train_command


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> RunFolder:
    """A supervised start and three steps at EP 2, with checkpoints before steps 2 and 3. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
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
    return RunFolder(folder)
