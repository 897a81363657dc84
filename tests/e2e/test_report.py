"""The report in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rl.report import write_report
from tests.unit.report.run_folder import make_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# Quiet, without network access, and allowed to run as root in a container.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


def rendered(page: Path) -> str:
    """What the browser made of the page's body."""
    result = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={page.parent / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=180,
    )
    return result.stdout[result.stdout.index("<body") :]


@needs_browser
def test_a_browser_draws_every_plot_and_the_first_rollout(tmp_path):
    folders = [make_run(tmp_path / name, steps=4, seed=seed) for seed, name in enumerate(("one", "two"))]
    write_report(folders, tmp_path / "out.html")
    body = rendered(tmp_path / "out.html")
    titles = re.findall(r'class="gtitle"[^>]*>([^<]*)<', body)
    assert {"Reward", "Entropy", "Ratio p_trainer / p_rollout", "Gradient norm", "Waiting"} <= set(titles)
    assert body.count('class="scatterlayer') >= len(titles) >= 8
    assert body.count("<option value=") == 16 and "one, step 0, g0.0: reward 0.500, advantage -1.00, 3 tokens (stop)" in body
    tokens = re.findall(r'<span class="token( silent)?"[^>]*>([^<]*)</span>', body)
    assert tokens == [("", "6"), (" silent", "="), ("", "7")]


@needs_browser
def test_a_run_can_be_hidden_and_lines_can_be_means(tmp_path):
    """By the page's own controls, which a script at its end works."""
    folders = [make_run(tmp_path / name, steps=30, seed=seed) for seed, name in enumerate(("one", "two"))]
    write_report(folders, tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    work = """<script>
      places[1].data.forEach(trace => { if (trace.name === places[1].data[0].name) trace.visible = "legendonly"; });
      document.querySelector('#runs input[value="one"]').click();
      document.getElementById("window").value = "5";
      document.getElementById("window").onchange();
      const reward = places[0].data[1], values = measured[0][1];
      document.body.dataset.lines = places[0].querySelectorAll(".scatterlayer .trace").length;
      document.body.dataset.legend = places[0].querySelectorAll(".legendtext").length;
      document.body.dataset.kept = places[1].data.filter(trace => trace.meta === "two").map(trace => trace.visible).join();
      document.body.dataset.off = Math.abs(reward.y[20] - values.slice(16, 21).reduce((a, b) => a + b) / 5);
    </script></body>"""
    (tmp_path / "worked.html").write_text(page.replace("</body>", work))
    found = dict(re.findall(r'data-(lines|legend|kept|off)="([^"]*)"', rendered(tmp_path / "worked.html").partition(">")[0]))
    # Of two lines, one for each run, the first run's is gone, and the legend still names the series; what a legend's entry hid
    # stays hidden.
    assert (found["lines"], found["legend"]) == ("1", "1") and found["kept"].endswith("legendonly"), found
    assert float(found["off"]) < 1e-6
