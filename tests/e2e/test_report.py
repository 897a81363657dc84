"""The report in a real browser."""

import re
import shutil
import subprocess

import pytest

from megatron_rl.report import write_report
from tests.unit.report.run_folder import make_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# Quiet, without a network of its own, and allowed to run as root in a container.
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_draws_every_plot_and_the_first_rollout(tmp_path):
    folders = [make_run(tmp_path / name, steps=4, seed=seed) for seed, name in enumerate(("one", "two"))]
    write_report(folders, tmp_path / "out.html")
    page = (tmp_path / "out.html").as_uri()
    result = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom", page],
        check=True, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    body = result.stdout[result.stdout.index("<body>") :]
    titles = re.findall(r'class="gtitle"[^>]*>([^<]*)<', body)
    assert {"Reward", "Entropy", "Ratio p_trainer / p_rollout", "Gradient norm", "Waiting"} <= set(titles)
    assert body.count('class="scatterlayer') >= len(titles) >= 8
    assert body.count("<option") == 16 and "one, step 0, g0.0: reward 0.500, advantage -1.00, 3 tokens (stop)" in body
    tokens = re.findall(r'<span class="token( silent)?"[^>]*>([^<]*)</span>', body)
    assert tokens == [("", "6"), (" silent", "="), ("", "7")]
