"""Which steps can be attributed and from where, refused before anything is started."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.attribution.request import make_request, reachable_steps, start_of
from megatron_rl.batching import Spool
from megatron_rl.config import ConfigError, RunFolder
from tests.unit.report.run_folder import make_run

RECORDED = [0, 1, 2, 3, 5, 6, 7, 8, 9]
"""The records of step 4 are gone."""


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """Steps 0 to 5, whose tokens are of version 4 and 5; the start and checkpoint 4 are there."""
    folder = make_run(tmp_path / "run", steps=6)
    (folder.model / "config.json").write_text(json.dumps(folder.config().model.architecture))
    folder.supervised_seal.write_text("{}")
    folder.checkpoint(4).mkdir()
    return folder


def test_steps_are_reached_over_recorded_steps_alone_and_not_from_too_far() -> None:
    assert reachable_steps([0, 6], RECORDED, retrain=20) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert reachable_steps([0, 6], RECORDED, retrain=1) == [0, 1, 6, 7]
    assert reachable_steps([0, 6], RECORDED, retrain=0) == [0, 6]


def test_the_start_is_the_latest_before_the_oldest_version() -> None:
    run, every = RunFolder(Path("run")), list(range(10))
    assert start_of(run, 8, 6, [0, 4, 7], every, retrain=20) == 4
    assert start_of(run, 8, 8, [0, 4, 7], every, retrain=20) == 7
    # too far to go back for the old versions: the step's own weights are had all the same
    assert start_of(run, 8, 3, [0, 4, 7], every, retrain=5) == 7


def test_a_step_too_far_from_all_weights_is_refused_with_those_that_are_not() -> None:
    with pytest.raises(
        ConfigError, match=r"weights of steps 0, 6 .*--retrain 2 only these steps are reached from there: 0..2, 6..8"
    ):
        start_of(RunFolder(Path("run")), 9, 9, [0, 6], RECORDED, retrain=2)


def test_the_request_knows_what_is_recorded(run) -> None:
    asked = make_request(run, [], 5, retrain=20, fault=None)
    assert asked.start == 4 and asked.versions == {4, 5} and asked.record.num_tokens == 6
    np.testing.assert_array_equal(
        asked.record.position[:2], np.array([6, 8])
    )  # after 6 tokens of the prompt; the tool's is left out
    assert asked.record.set_size.tolist() == [3, 1] * 3 and asked.record.is_last.tolist() == [False, True] * 3
    assert asked.record.version.tolist() == [4, 5] * 3 and asked.record.temperature.tolist() == [1.0] * 3


def test_steps_that_are_not_recorded_say_why_and_which_are(run) -> None:
    def refused(step: int) -> str:
        with pytest.raises(ConfigError) as caught:
            make_request(run, [], step, retrain=1, fault=None)
        return str(caught.value)

    assert "has no such step; the run has trained steps 0 to 5; steps that can be attributed: 0..1, 4..5" in refused(9)
    (run.path / "spool" / "rollouts" / "g1.safetensors").unlink()
    assert "step 1: the step was trained, but its plan or payloads are no longer complete" in refused(1)
    spool = Spool(run.path)
    plan = json.loads(spool.path(spool.plan_name(5)).read_text())
    spool.path(spool.plan_name(6)).write_text(json.dumps(plan | {"step": 6}))
    assert "step 6: the step is planned, but not trained yet; wait for it" in refused(6)
    assert "these steps are reached from there: 0, 4..5" in refused(3)


def test_a_run_that_has_done_no_step_and_a_folder_without_a_run(tmp_path) -> None:
    folder = make_run(tmp_path / "run", steps=0)
    with pytest.raises(ConfigError, match="has trained no step yet; steps that can be attributed: none"):
        make_request(folder, [], 0, retrain=20, fault=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_request(RunFolder(tmp_path / "nothing"), [], 0, retrain=20, fault=None)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("no-such", "use one of swapped-gate-up, shifted-routes"), ("unreduced-expert-grad", "each expert is on one rank only")],
)
def test_faults_that_cannot_be_injected_are_refused(run, fault, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_request(run, [], 4, retrain=20, fault=fault)
