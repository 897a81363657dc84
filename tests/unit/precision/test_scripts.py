"""The comparison of runs and the benchmark: their arithmetic, and what they write. Neither speed nor learning."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import REPOSITORY


@pytest.fixture
def comparison() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_nvfp4", REPOSITORY / "scripts" / "compare_nvfp4.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs(comparison: ModuleType, rewards: list[float]) -> list[dict[str, float]]:
    return [dict.fromkeys(comparison.COLUMNS, 1.0) | {"reward_last10": reward} for reward in rewards]


def test_distances_are_in_standard_errors_of_the_difference(comparison: ModuleType, capsys: pytest.CaptureFixture) -> None:
    arms = {"whole": [0.6, 0.7, 0.8], "qat": [0.5, 0.6, 0.7], "rollouts-alone": [0.1, 0.2, 0.3]}
    result = comparison.compare({arm: runs(comparison, rewards) for arm, rewards in arms.items()})
    error = 0.1 / 3**0.5
    assert result["table"]["whole"]["reward_last10"] == (pytest.approx(0.7), pytest.approx(error))
    assert result["final_reward_in_standard_errors"]["qat"] == pytest.approx(-0.1 / (2 * error**2) ** 0.5)
    comparison.show(result)
    assert "final reward of qat less that of whole: -1.22 standard errors" in capsys.readouterr().out


def test_a_finished_run_is_not_started_again(comparison: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--run.folder", str(tmp_path), "--run.name", "a", "--run.steps", "4"]
    started = []
    monkeypatch.setattr(comparison.subprocess, "run", lambda command, **_: started.append(command))
    (tmp_path / "a").mkdir()
    comparison.finish(comparison.DEMO, words)
    assert started[0][-len(words) :] == words
    (tmp_path / "a" / "config.toml").write_text("")
    (tmp_path / "a" / "summary.json").write_text('{"steps": 3}')
    comparison.finish(comparison.DEMO, words)
    assert started[1][-2:] == [str(tmp_path / "a" / "config.toml"), "--resume"]
    (tmp_path / "a" / "summary.json").write_text('{"steps": 4}')
    assert comparison.finish(comparison.DEMO, words) == tmp_path / "a" and len(started) == 2


def test_the_benchmark(tmp_path: Path) -> None:
    script, out = str(REPOSITORY / "scripts" / "bench_nvfp4.py"), tmp_path / "out.json"
    options = ["--tokens", "128", "--repeats", "1", "--json", str(out), "--trainer.max_tokens_per_microbatch=64"]
    small = ["--model.architecture.num_hidden_layers=1", "--model.max_sequence_length=64"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *options, *small], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(out.read_text())
    assert written["step_cost_share"] == written["steps"][-1]["share"] and written["steps"][0]["microbatches"] == 2
    assert 0 < written["steps"][0]["quantising_s"] < written["steps"][0]["nvfp4_s"]
    # 9 of 32 parts, and a global scale of 4 bytes for matrices of at least 8192 elements.
    assert 9 / 32 < written["wire_bytes_over_bf16"] < 9 / 32 + 4 / 16384 < written["framed_over_bf16"] < 0.3
