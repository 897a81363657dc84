"""scripts/gpu_smoke.sh without a GPU: which steps a machine gets, and what becomes of each. Not shown: the steps on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

from megatron_rl.config import load_config
from megatron_rl.processes.gpus import Gpu
from scripts.smoke.runner import NUMBERS, Verdict, run_step, run_steps, why_skipped
from scripts.smoke.steps import CONFIG, PROGRAM, Step, steps

ROOT = Path(__file__).parents[2]


def machine(count: int, capability: tuple[int, int] = (9, 0)) -> tuple[Gpu, ...]:
    return tuple(Gpu(str(n), "NVIDIA X", f"GPU-{n}", 80_000, capability, "580") for n in range(count))


def passing(count: int, capability: tuple[int, int] = (9, 0)) -> set[str]:
    """Steps that run where all before them have passed."""
    gpus = machine(count, capability)
    wanted = steps(Path("/f"), gpus)
    passed = [Verdict(step.name, step.what, "pass") for step in wanted if step.gpus <= count]
    return {step.name for step in wanted if not why_skipped(step, gpus, passed)}


def test_a_machine_gets_the_steps_that_its_gpus_suffice_for():
    alone = {"doctor", "contracts", "installed", "keep-set", "te", "muon", "answer"}
    assert passing(1) == alone
    assert passing(2) == alone | {"nccl", "deterministic", "rerun", "times"}
    assert passing(3) == passing(8) == passing(2) | {"tp2", "ep2", "pp2"}
    assert passing(8, (10, 0)) == passing(8) | {"nvfp4-bytes", "nvfp4", "nvfp4-native"}
    assert passing(1, (10, 0)) == alone | {"nvfp4-bytes"}
    assert passing(0) == {"doctor", "contracts", "keep-set-interpreted", "cpu", "cpu-rerun", "times"}


def test_the_configuration_of_every_run_is_valid():
    """Also that no run needs more GPUs than its step says: trainer ranks and servers."""
    for step in [*steps(Path("/f"), ()), *steps(Path("/f"), machine(8, (10, 0)))]:
        for command in step.commands:
            if command[: len(PROGRAM) + 1] == (*PROGRAM, "train"):
                config = load_config(ROOT / CONFIG, list(command[len(PROGRAM) + 2 :]))
                wanted = config.layout.world_size + config.servers.count * config.servers.tensor
                assert step.gpus == (0 if config.device == "cpu" else wanted), step.name


def test_each_step_has_a_verdict_its_numbers_and_its_log(tmp_path):
    add = f"import json, os; open(os.environ['{NUMBERS}'], 'w').write(json.dumps({{'error': 0.25}}))"
    wanted = [
        Step("good", "adds a number", ((sys.executable, "-c", add),)),
        Step("bad", "ends with 3", ((sys.executable, "-c", "print('why'); exit(3)"),)),
        Step("slow", "waits", ((sys.executable, "-c", "import time; time.sleep(600)"),), limit_s=1.0),
        Step("after", "looks at what bad leaves", after=("bad",)),
        Step("wide", "needs GPUs", gpus=2),
    ]
    shown = []
    verdicts = run_steps(wanted, tmp_path, machine(1), 600.0, shown.append)
    assert shown == verdicts
    assert [v.verdict for v in verdicts] == ["pass", "fail", "fail", "skipped", "skipped"]
    good, bad, slow, after, wide = verdicts
    assert good.numbers == {"error": 0.25} and "error 0.25" in good.line
    assert bad.reason == "ended with status 3: why" and Path(bad.log).read_text().endswith("why\n")
    assert slow.reason == "has not ended within 1 s"
    assert "none of these passed" in after.reason
    assert wide.reason == "needs 2 GPUs; there is 1"
    assert [v["step"] for v in json.loads((tmp_path / "verdicts.json").read_text())] == ["good", "bad", "slow", "after", "wide"]


def test_a_check_that_is_skipped_on_a_machine_with_gpus_has_not_passed(tmp_path, monkeypatch):
    """As with a build of torch for the CPU, which sees no GPU either."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (step,) = (step for step in steps(tmp_path, machine(1)) if step.name == "muon")
    verdict = run_step(step, tmp_path, 300.0)
    assert verdict.verdict == "fail" and "skipped" in verdict.reason


def test_what_would_begin_after_the_time_is_skipped(tmp_path):
    verdicts = run_steps([Step("late", "")], tmp_path, (), 0.0, print)
    assert [(v.verdict, v.reason) for v in verdicts] == [("skipped", "the 0 s are over")]


def test_without_a_gpu_the_script_says_so(tmp_path):
    command = ["bash", "scripts/gpu_smoke.sh", "--folder", str(tmp_path / "f"), "--only", "doctor", "nccl"]
    path = "/usr/bin:/bin"  # no nvidia-smi of this machine
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": path, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "No GPU here" in done.stdout and "1 passed, 0 failed, 1 skipped" in done.stdout
    assert "needs 2 GPUs; there are none" in done.stdout
    assert (tmp_path / "f" / "logs.tar.gz").exists()
