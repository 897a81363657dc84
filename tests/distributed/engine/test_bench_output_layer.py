"""That the benchmark runs, that its arms agree (it stops if not), and what it writes. Says nothing of speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_share_of_the_output_layer(tmp_path):
    script = str(ROOT / "scripts" / "bench_output_layer.py")
    options = [
        "--tokens",
        "128",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "out.json"),
        "--model.architecture.num_hidden_layers=1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, script, *options], check=False, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == {"keep_set", "dense_masked"}
    for numbers in written.values():
        assert 0 < numbers["share"] < 1
