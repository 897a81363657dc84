"""`megatron-rl replay` of runs whose rollouts came from a live vLLM while they trained. Not proved here: GPUs.

pytest tests/e2e/test_replay.py -m slow        ten steps at TP 2 x PP 2 x EP 2, four ranks
"""

import json
import re
import shutil

import pytest

from megatron_rl.config import RunFolder
from megatron_rl.conversion.torch_dist import read_torch_dist
from tests.e2e.runs import processes_of, replay, run, train_command


def test_the_steps_of_an_asynchronous_run_are_rerun_to_the_bit(recorded):
    again = replay(recorded.path, "--from-step", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [f"step {n}: equal; " in again.stdout for n in range(3)] == [True] * 3
    assert len(re.findall(r"tensors are the same to the bit \(by fingerprints\)", again.stdout)) == 3
    assert not list(processes_of(recorded.path))


def test_the_steps_change_all_kinds_of_state(recorded):
    """The comparison above is not of a state that never changes."""
    first, last = (json.loads((recorded.fingerprints / f"step_{step:06d}.json").read_text())["ranks"] for step in (0, 2))
    for rank in range(2):
        assert any(name.endswith(" exp_avg_sq") for name in first[rank])
        changed = [name for name in first[rank] if first[rank][name] != last[rank][name]]
        assert len(changed) > 0.8 * len(first[rank])  # an expert that no token was sent to keeps its weights


def test_a_step_that_was_trained_on_something_else_is_found_and_its_first_tensor_named(recorded, tmp_path):
    altered = RunFolder(tmp_path / "altered")
    shutil.copytree(recorded.path, altered.path, symlinks=True)
    plan_file = altered.path / "spool" / "plans" / "step_000002.json"
    plan = json.loads(plan_file.read_text())
    plan["entries"][0]["advantage"] += 0.25
    plan_file.write_text(json.dumps(plan))
    again = replay(altered.path, "--from-step", "2")
    assert again.returncode == 1, again.stdout + again.stderr
    # the checkpoint after the step, before step 3, tells the size
    assert re.search(r"step 2: DIFFERS; the first tensor that differs is \S.* on rank 0 by at most \d", again.stdout), (
        again.stdout
    )
    assert re.search(r"loss: \S+ recorded, \S+ in the rerun", again.stdout)


def test_at_another_layout_a_step_is_compared_with_the_checkpoint_after_it(recorded):
    again = replay(recorded.path, "--from-step", "2", "--layout.world_size", "1", "--layout.expert", "1")
    assert "(by checkpoint)" in again.stdout or "by at most" in again.stdout, again.stdout + again.stderr
    # fp32, sums in another order; the update of AdamW's first steps is about the learning rate, 4e-4, times the sign of the
    # gradient
    assert all(float(size) < 1e-4 for size in re.findall(r"by at most ([\d.e+-]+\d)", again.stdout)), again.stdout


def test_a_byte_of_a_checkpoint_that_a_disk_has_changed_is_found_and_its_tensor_named(recorded, tmp_path):
    damaged = RunFolder(tmp_path / "damaged")
    shutil.copytree(recorded.path, damaged.path, symlinks=True)
    arrays = read_torch_dist(damaged.checkpoint(2) / "engine")
    chunk = max((chunk for array in arrays.values() for chunk in array.chunks), key=lambda chunk: chunk.length)
    with open(chunk.file, "r+b") as file:
        file.seek(chunk.start + chunk.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    again = replay(damaged.path, "--from-step", "2")
    assert again.returncode == 1, again.stdout + again.stderr
    assert re.search(
        r"step_000002: \S.* of rank \d and \d+ more tensors are not what was saved; remove the folder", again.stderr
    ), again.stderr


def test_a_step_before_which_no_state_is_known_is_refused_with_those_that_are(recorded):
    refused = replay(recorded.path, "--from-step", "1")
    assert refused.returncode == 2 and "can be rerun from 0, 2" in refused.stderr
    too_many = replay(recorded.path, "--from-step", "2", "--steps", "2")
    assert too_many.returncode == 2 and "1 recorded steps in a row" in too_many.stderr


@pytest.mark.slow
def test_ten_steps_at_tp_2_pp_2_ep_2_come_out_the_same_to_the_bit(tmp_path):
    folder = tmp_path / "ten-steps"
    layout = ["--layout.world_size", "4", "--layout.tensor", "2", "--layout.pipeline", "2", "--layout.expert", "2"]
    done = run(train_command(folder, "--run.steps", "10", "--checkpoint.every", "10", *layout), timeout_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    again = replay(folder, "--from-step", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(re.findall(r"step \d: equal; \d+ tensors are the same to the bit \(by fingerprints\)", again.stdout)) == 10
