"""The spool: plans are written whole and read back equal; what is not a plan is refused by name."""

import stat
from dataclasses import replace

import pytest

from megatron_rl.batching import Spool, SpoolError, SupervisedExample, SupervisedPlan
from megatron_rl.records import PayloadError, PlanEntry, StepPlan

ENTRY = PlanEntry(
    "g1.0", prompt_index=3, file="rollouts/g1.safetensors", index=0, num_tokens=7, num_loss_tokens=4, advantage=1 / 3
)
STEP = StepPlan(step=12, entries=(ENTRY,), summary={"reward_mean": 0.1 + 0.2})


@pytest.fixture
def spool(tmp_path):
    spool = Spool(tmp_path)
    spool.create()
    return spool


def test_plans_of_each_kind_round_trip_to_the_last_bit(spool):
    assert spool.write_plan(STEP) == "plans/step_000012.json"
    assert spool.write_plan(STEP, "probe") == "plans/probe_000012.json"
    assert spool.read_plan("plans/step_000012.json") == spool.read_plan("plans/probe_000012.json") == STEP


def test_a_supervised_plan_counts_its_solutions():
    plan = SupervisedPlan(3, (SupervisedExample((1, 2), (3,)), SupervisedExample((4,), (5, 6))))
    assert (plan.num_loss_tokens, plan.num_sequences) == (3, 2)


def test_a_folder_that_moves_keeps_its_names(spool, tmp_path):
    name = spool.write_plan(STEP)
    spool.root.parent.rename(tmp_path.with_name("moved"))
    assert Spool(tmp_path.with_name("moved")).read_plan(name) == STEP


def test_folders_and_plans_are_private(spool):
    spool.write_plan(STEP)
    assert stat.S_IMODE(spool.path("plans/step_000012.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.plans.stat().st_mode) == 0o700
    spool.create()  # again, as a resumed run does


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_half_plan_is_refused_by_name(spool, share):
    path = spool.path(spool.write_plan(STEP))
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(SpoolError, match=r"step_000012\.json: not a complete plan"):
        spool.read_plan("plans/step_000012.json")


def test_a_plan_under_another_steps_name_is_refused(spool):
    spool.path("plans/step_000013.json").write_bytes(spool.path(spool.write_plan(STEP)).read_bytes())
    with pytest.raises(SpoolError, match="holds the plan of step 12"):
        spool.read_plan("plans/step_000013.json")


def test_missing_and_foreign_names_are_refused(spool):
    with pytest.raises(SpoolError, match="cannot be read"):
        spool.read_plan("plans/step_000099.json")
    for name in ("plans/steps_000001.json", "plans/step_one.json", "plans/step.json"):
        with pytest.raises(SpoolError, match="KIND_NUMBER"):
            spool.read_plan(name)
    with pytest.raises(SpoolError, match="not the name of a file"):
        spool.read_plan("../../step_000001.json")
    with pytest.raises(SpoolError, match="not the name of a file"):
        spool.payload("/etc/passwd")


def test_a_plan_with_a_nan_is_not_written(spool):
    bad = StepPlan(1, (PlanEntry("g9.1", 0, "f", 0, 2, 1, float("nan")),), summary={"reward_mean": float("inf")})
    with pytest.raises(SpoolError, match=r"the advantage of g9\.1 = nan; reward_mean = inf"):
        spool.write_plan(bad)
    assert not list(spool.plans.iterdir())


def test_what_a_dead_writer_left_aside_is_deleted(spool):
    (spool.rollouts / ".g4.safetensors.77.part").write_bytes(b"half")
    (spool.plans / ".step_000001.json.77.part").write_bytes(b"half")
    assert spool.clean_half_written() == 2
    assert not list(spool.root.rglob(".*"))


def test_a_missing_payload_is_refused_by_name(spool):
    with pytest.raises(PayloadError, match=r"g7\.safetensors"):
        spool.payload(spool.payload_name("g7"))


def test_what_is_forgotten_is_gone_with_its_payloads_and_nothing_else_is(spool):
    for step in range(4):
        entry = replace(ENTRY, file=spool.payload_name(f"g{step}"))
        spool.write_plan(replace(STEP, step=step, entries=(entry,)))
        spool.path(entry.file).touch()
    probe = replace(ENTRY, file=spool.payload_name("p1"))
    spool.write_plan(replace(STEP, step=1, entries=(probe,)), kind="probe")
    spool.path(probe.file).touch()
    assert spool.forget(2) == 6 and spool.forget(2) == 0
    assert sorted(p.name for p in spool.rollouts.iterdir()) == ["g2.safetensors", "g3.safetensors"]
    assert sorted(p.name for p in spool.plans.iterdir()) == ["step_000002.json", "step_000003.json"]
