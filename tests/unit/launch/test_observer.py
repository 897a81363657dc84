"""Events for the user next to the numbers of the steps."""

from pathlib import Path

import pytest

from megatron_rl.config import RunFolder, load_config
from megatron_rl.launch.observer import STEPS_OF_EQUAL_REWARDS, RunObserver
from megatron_rl.metrics import read_rows

CONFIG = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"


@pytest.mark.parametrize(
    ("shares", "events"),
    [
        ([1.0] * (STEPS_OF_EQUAL_REWARDS - 1) + [0.9] + [1.0] * (STEPS_OF_EQUAL_REWARDS - 1), 0),
        ([0.5, *[1.0] * (STEPS_OF_EQUAL_REWARDS + 4)], 1),
        ([1.0] * STEPS_OF_EQUAL_REWARDS + [0.0] + [1.0] * STEPS_OF_EQUAL_REWARDS, 2),
    ],
)
def test_equal_rewards_are_reported_once_while_they_last(tmp_path: Path, shares: list[float], events: int) -> None:
    folder = RunFolder(tmp_path / "run")
    config = load_config(CONFIG)
    folder.make()
    folder.create(config)
    with RunObserver(config, folder) as observer:
        for share in shares:
            observer.batch({"equal_reward_share": share, "reward_mean": 0.25}, ())
        observer.batch({"num_rollouts": 0.0}, ())  # a step that nothing was left for
    log = (folder.logs / "events.log").read_text()
    assert log.count("no learning signal") == events
    assert not events or "(mean 0.25)" in log


def test_a_plan_of_a_former_version_does_not_replace_what_the_trainer_measured(tmp_path: Path) -> None:
    """Its summary has a singleton_share, which is now the trainer's name; such a plan is trained by a run that is resumed."""
    folder = RunFolder(tmp_path / "run")
    config = load_config(CONFIG)
    folder.make()
    folder.create(config)
    with RunObserver(config, folder) as observer:
        observer.batch({"singleton_share": 0.5, "reward_mean": 0.25}, ())
        observer.step(0, {"singleton_share": 0.625}, rollout_tokens_per_s=1.0, ledger={"drawn": 1})
    (row,) = read_rows(folder.metrics_file)
    assert row.values["singleton_share"] == 0.625 and row.values["reward_mean"] == 0.25
