"""The run that several tests look into."""

import pytest

from megatron_rl.config import RunFolder
from tests.e2e.runs import run, train_command


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> RunFolder:
    """Three steps at EP 2, with checkpoints before steps 2 and 3. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    done = run(train_command(folder, "--run.steps", "3", "--model.architecture.num_hidden_layers", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder(folder)
