"""The fit finds a machine that it is shown through its measurements alone, and predicts layouts that it was not shown.

What it does not show: real measurements; those are compared by `megatron-rl plan --measure` itself.
"""

from dataclasses import replace

import pytest

from megatron_rl.planner import ParameterCounts, machine_named
from megatron_rl.planner.fit import fitted, predicted
from megatron_rl.planner.measure import CASES, MEASURED_SIZES
from megatron_rl.planner.measured_ranks import RankMeasurement
from megatron_rl.weight_mapping.shrink import shrink_model
from tests.unit.planner.subject import PUBLISHED


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_layouts_that_were_not_shown_are_predicted(name: str) -> None:
    counts, known = ParameterCounts(shrink_model(PUBLISHED[name], MEASURED_SIZES)), machine_named("cpu")
    hidden = replace(
        known,
        matmul_efficiency=1.7,
        expert_efficiency=1.7,
        attention_efficiency=1.7,
        layer_overhead_us=900.0,
        nvlink_gb_s=0.4,
        cores=1.6,
        reserved_gib=0.5,
        activation_factor=1.4,
    )
    measured = []
    for case in CASES:
        seconds, size = predicted(counts, hidden, case)
        measured.append((case, RankMeasurement(seconds, int(size))))
    found = fitted(counts, known, [pair for pair in measured if pair[0].fits])
    for case, truth in measured:
        seconds, size = predicted(counts, found, case)
        # Factors that the shown layouts cannot tell apart may share their work differently.
        assert seconds == pytest.approx(truth.step_s, rel=0.15)
        assert size == pytest.approx(truth.peak_bytes, rel=0.02)
