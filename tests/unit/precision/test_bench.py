"""That the benchmark runs, and what it writes. Says nothing of speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.source import REPOSITORY


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
