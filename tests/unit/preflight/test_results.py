"""What counts as passed, and how a report is written down."""

import io
import json

from rich.console import Console

from megatron_rl.preflight.results import CheckReport, Measurement, StageResult
from megatron_rl.preflight.table import print_report

NAN = float("nan")


def report(*stages: StageResult) -> CheckReport:
    return CheckReport(
        {"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 96}, {"world_size": 4, "tensor": 2}, None, stages
    )


def test_a_number_beyond_its_bound_or_no_number_fails() -> None:
    assert Measurement("a", 1.0, 2.0).passed and not Measurement("a", 3.0, 2.0).passed
    assert Measurement("a", 3.0, 2.0, at_least=True).passed and not Measurement("a", 1.0, 2.0, at_least=True).passed
    assert not Measurement("a", NAN, 2.0).passed and not Measurement("a", NAN, 2.0, at_least=True).passed


def test_failed_stages_are_named_and_a_skipped_one_is_neither() -> None:
    found = report(
        StageResult("forward", "t", (Measurement("a", 1.0, 2.0), Measurement("b", 3.0, 2.0))),
        StageResult("layout", "t", aborted=True, note="[rank 1] gone"),
        StageResult("sync", "t", skipped=True, note="not run: no vLLM"),
    )  # fmt: skip
    assert found.failed == ("forward", "layout")
    tree = json.loads(json.dumps(found.as_json()))
    assert tree["passed"] is False and [s["passed"] for s in tree["stages"]] == [False, False, None]
    assert [m["passed"] for m in tree["stages"][0]["measurements"]] == [True, False]
    out = io.StringIO()
    print_report(found, Console(file=out, width=120))
    for expected in ("failed: forward, layout", "[rank 1] gone", "not run: no vLLM", "tensor 2"):
        assert expected in out.getvalue()
