"""What a former version wrote is read: its configuration, metrics, rollouts and scores. Rerun and resume: tests/e2e."""

import math

from megatron_rl.batching import Spool
from megatron_rl.metrics import read_rows
from megatron_rl.report import write_report
from tests.recorded_run import STEPS, extract


def test_the_report_shows_a_run_of_a_former_version(tmp_path):
    recorded = extract(tmp_path)
    written = write_report([recorded], tmp_path / "out.html")
    assert not written.remarks
    page = (tmp_path / "out.html").read_text()
    spool = Spool(recorded.path)
    for step in (0, STEPS - 1):
        assert any(f'"uid": "{entry.uid}"' in page for entry in spool.recorded(step).entries), step


def test_its_configuration_metrics_and_plans_are_read(tmp_path):
    recorded = extract(tmp_path)
    config = recorded.config()
    assert (config.run.steps, config.layout.world_size, config.layout.expert) == (STEPS, 2, 2)
    rows = read_rows(recorded.metrics_file)
    assert [row.step for row in rows] == list(range(STEPS))
    assert all(math.isfinite(row.values["loss"]) and row.values["staleness_max"] <= 1 for row in rows)
    spool = Spool(recorded.path)
    assert all(len(spool.recorded(step).entries) == 16 for step in range(STEPS))
    assert [step for step, _ in recorded.complete_checkpoints()] == [4]
