"""Predicted step times of published runs lie within the band that the machine's table states.

What it does not show: times of this program, whose dispatcher and engine are not those of the published runs.
"""

import json

import pytest

from megatron_rl.planner import Candidate, ParameterCounts, Workload, machine_named
from megatron_rl.planner.step_time import step_time
from megatron_rl.topology import Layout
from tests.unit.planner.subject import PUBLISHED, ROOT

TABLE = json.loads((ROOT / "tests" / "data" / "published_runs.json").read_text())
RUNS = [dict(zip(TABLE["columns"], run, strict=True)) for run in TABLE["runs"]]


def slowness(run: dict) -> float:
    """Published seconds over predicted ones."""
    layers, stages = PUBLISHED[run["model"]]["num_hidden_layers"], run["pp"] * run["vpp"]
    # Flexible layouts of the published runs are not known: a number of layers that divides, and time in proportion.
    padded = -(-layers // stages) * stages
    counts = ParameterCounts(PUBLISHED[run["model"]] | {"num_hidden_layers": padded, "layer_types": None})
    layout = Layout(run["gpus"], tp=run["tp"], pp=run["pp"], cp=run["cp"], vpp=run["vpp"], ep=run["ep"])
    work = Workload(
        run["sequence_length"], 0.0, run["sequence_length"], run["sequences"], 1, scoring_passes=0, truncated=False, replays_routes=False,
        imbalance=1.0, unevenness=0.0,
    )  # fmt: skip
    candidate = Candidate(layout, run["microbatch"] * run["sequence_length"], "none")
    machine = machine_named(run["machine"])
    time = (
        step_time(counts, work, candidate, machine, precision=run["precision"], overlaps_reduction=True).total * layers / padded
    )
    return work.tokens / run["gpus"] / run["tokens_per_s_per_gpu"] / time


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['model']}-{run['machine']}-{run['precision']}")
def test_a_published_run_lies_within_the_band(run: dict) -> None:
    machine = machine_named(run["machine"])
    assert machine.error_low <= slowness(run) <= machine.error_high
