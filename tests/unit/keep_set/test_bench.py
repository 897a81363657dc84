"""That the benchmark runs, that its arms agree (it stops if not), and what it writes. Says nothing of speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_quick_benchmark(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench_keep_set.py"),
        "--quick",
        "--repeats",
        "0",
        "--json",
        str(tmp_path / "out.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "--sets", "published", "all_flat"], check=False, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    ratios = (
        "speedup_dense_masked",
        "speedup_chunked",
        "memory_over_dense_masked",
        "time_over_floor",
        "adversarial_worst_over_chunked",
    )
    assert all(written[name] > 0 and f"{name} = " in result.stdout for name in ratios)
    assert [row["sets"] for row in written["table"]] == ["published", "all_flat"]
    assert set(written["table"][0]["arms"]) == {"keep_set", "keep_set_dense", "dense_masked", "chunked"}
