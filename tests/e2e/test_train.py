"""`megatron-rl train` with the real vLLM and the real Megatron-Core: two steps, a resume, faults. Not proved here: that it
learns."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.config import RunFolder
from megatron_rl.metrics import read_rows
from megatron_rl.metrics.catalogue import unknown_names
from tests.e2e.runs import PROGRAM
from tests.e2e.runs import run as call

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "model_configs" / "tiny-moe-cpu.toml"
SMALL = [
    "--run.steps", "2", "--supervised.steps", "4", "--supervised.batch_size", "8", "--rollouts.prompts_per_step", "4",
    "--rollouts.samples_per_prompt", "4", "--rollouts.max_new_tokens", "6", "--weight_sync.probe_prompts", "2",
    "--model.architecture.num_hidden_layers", "2",
]  # fmt: skip


def command(folder: Path, *words: str) -> list[str]:
    named = ["--run.folder", str(folder.parent), "--run.name", folder.name]
    return [sys.executable, "-m", "megatron_rl.launch.cli", "train", str(CONFIG), *SMALL, *named, *words]


def train(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(folder, *words), capture_output=True, text=True, timeout=400, cwd=REPOSITORY, check=False)


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes of this run that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def eventually(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_every_token_has_its_keep_set_and_routes_and_both_sides_agree(recorded):
    summary = json.loads(recorded.summary_file.read_text())
    assert summary["steps"] == 3
    assert summary["keep_set_coverage"] == 1.0 and summary["routing_coverage"] == 1.0
    # fp32, sampled and scored at equal weights: what is left is rounding of another order of sums
    assert summary["abs_dlogp_mean"] < 1e-5
    assert abs(summary["ratio_mean"] - 1.0) < 1e-4


def test_the_export_is_a_model_that_transformers_loads_with_other_weights_than_the_start(recorded):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = AutoModelForCausalLM.from_pretrained(recorded.export, dtype=torch.float32)
    started = AutoModelForCausalLM.from_pretrained(recorded.model, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(recorded.export)("12 + 30=").input_ids])
    with torch.no_grad():
        assert (exported(ids).logits - started(ids).logits).abs().max() > 1e-3


def test_the_export_holds_the_trainers_weights_to_the_bit(recorded, tmp_path):
    from safetensors.torch import load_file

    words = [
        sys.executable,
        "-m",
        "megatron_rl.launch.cli",
        "convert",
        "megatron-to-hf",
        str(recorded.checkpoint(3)),
        str(tmp_path / "converted"),
    ]
    converted = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=REPOSITORY, check=False)
    assert converted.returncode == 0, converted.stdout + converted.stderr
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "converted", recorded.export))
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)


def test_a_finished_run_continues_to_more_steps(recorded, tmp_path):
    run = RunFolder(tmp_path / "more-steps")
    shutil.copytree(recorded.path, run.path, symlinks=True)
    words = ["--run.folder", str(tmp_path), "--run.name", run.path.name, "--resume", "--run.steps", "4"]
    resumed = call([*PROGRAM, "train", str(run.config_file), *words])
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rows = read_rows(run.metrics_file)
    assert unknown_names({name for row in [*rows, *read_rows(run.metrics_file, "supervised")] for name in row.values}) == []
    assert [row.step for row in rows] == [0, 1, 2, 3]
    assert rows[3].values["staleness_max"] <= 2  # of groups that were buffered when the first run ended
    saved = json.loads((run.checkpoint(4) / "orchestrator.json").read_text())
    assert saved["ledger"]["trained_prompts"] == 4 * 2


def test_an_existing_run_is_not_overwritten(recorded):
    refused = train(recorded.path)
    assert refused.returncode == 2 and "--resume" in refused.stderr


def test_a_killed_server_is_replaced_and_ctrl_c_leaves_a_checkpoint(tmp_path):
    folder = tmp_path / "faults"
    process = subprocess.Popen(
        command(folder, "--run.steps", "500", "--checkpoint.every", "1000"),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        metrics = RunFolder(folder).metrics_file
        assert eventually(lambda: metrics.exists() and len(read_rows(metrics)) >= 1, 200)
        server = next(int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if _is_server(p, folder))
        key = key_of(server)
        os.kill(server, signal.SIGKILL)
        steps_before = len(read_rows(metrics))
        assert eventually(lambda: len(read_rows(metrics)) >= steps_before + 3, 200)
        assert "will be sampled again" in (folder / "logs" / "events.log").read_text()
        process.send_signal(signal.SIGINT)
        process.wait(90)
    finally:
        process.kill()
        output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    assert RunFolder(folder).latest_checkpoint() is not None
    assert eventually(lambda: not processes_of(folder), 15), processes_of(folder)
    assert key.encode() not in output.encode()
    assert not [file for file in folder.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]


def key_of(server: int) -> str:
    """The run's key: in the server's environment, on no command line."""
    environment = dict(word.split("=", 1) for word in Path(f"/proc/{server}/environ").read_text().split("\0") if "=" in word)
    key = environment["MEGATRON_RL_KEY"]
    assert len(key) == 32 and key not in Path(f"/proc/{server}/cmdline").read_text()
    return key


def test_kill_9_of_the_program_leaves_no_process_behind(tmp_path):
    folder = tmp_path / "killed"
    process = subprocess.Popen(command(folder), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert eventually(
            lambda: len(processes_of(folder)) >= 4, 200
        )  # server, worker, two ranks; the program names the folder in two words
    finally:
        process.kill()
        process.wait()
    assert eventually(lambda: not processes_of(folder), 30), processes_of(folder)


def _is_server(cmdline: Path, folder: Path) -> bool:
    try:
        line = cmdline.read_bytes().decode(errors="replace")
    except OSError:
        return False
    return "inference.vllm.plugin.serve" in line and str(folder) in line
