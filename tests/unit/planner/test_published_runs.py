"""Predicted step times of published runs.

Of those that the shipped factors were fitted to, and of models that a fit has not seen.

What it does not show: times of this program, whose dispatcher and engine are not those of the published runs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

from megatron_rl.planner import Candidate, Machine, ParameterCounts, Workload, machine_named
from megatron_rl.planner.fit import coordinate_descent
from megatron_rl.planner.step_time import step_time
from megatron_rl.topology import Layout
from tests.unit.planner.subject import PUBLISHED, ROOT

TABLE = json.loads((ROOT / "tests" / "data" / "published_runs.json").read_text())
RUNS = [dict(zip(TABLE["columns"], run, strict=True)) for run in TABLE["runs"]]
# Machines that share their factors in machines.toml.
FAMILIES = {"H100 and B200": ("h100", "b200"), "GB200 and GB300": ("gb200", "gb300")}
MODELS = sorted({run["model"] for run in RUNS})

# Where a fit begins: nothing of it was taken from the runs. Five factors are more than a few runs tell apart, so that those that
# they
# leave open stay near these.
START = {
    "matmul_efficiency": 0.5,
    "expert_efficiency": 0.5,
    "expert_half_rows": 200.0,
    "memory_efficiency": 0.5,
    "layer_overhead_us": 1000.0,
}
PULL = 0.05

# Published over predicted seconds. Left out of the fit is every run of the model, on all machines of the family.
HELD_OUT_BAND = {"H100 and B200": (0.5, 1.9), "GB200 and GB300": (0.7, 1.5)}
# Typical factor between published and predicted seconds, exp of the root mean square of the logarithm: (shipped factors on the
# runs that
# they were fitted to, factors fitted without the model).
TYPICAL = {"H100 and B200": (1.40, 1.60), "GB200 and GB300": (1.20, 1.28)}


@cache
def counts_of(model: str, num_layers: int) -> ParameterCounts:
    return ParameterCounts(PUBLISHED[model] | {"num_hidden_layers": num_layers, "layer_types": None})


def slowness(run: Mapping, machine: Machine) -> float:
    """Published seconds over predicted ones."""
    layers, stages = PUBLISHED[run["model"]]["num_hidden_layers"], run["pp"] * run["vpp"]
    # Flexible layouts of the published runs are not known: a number of layers that divides, and time in proportion.
    padded = -(-layers // stages) * stages
    counts = counts_of(run["model"], padded)
    layout = Layout(run["gpus"], tp=run["tp"], pp=run["pp"], cp=run["cp"], vpp=run["vpp"], ep=run["ep"])
    work = Workload(
        run["sequence_length"],
        0.0,
        run["sequence_length"],
        run["sequences"],
        1,
        scoring_passes=0,
        truncated=False,
        replays_routes=False,
        imbalance=1.0,
        unevenness=0.0,
    )
    candidate = Candidate(layout, run["microbatch"] * run["sequence_length"], "none")
    time = (
        step_time(counts, work, candidate, machine, precision=run["precision"], overlaps_reduction=True).total * layers / padded
    )
    return work.tokens / run["gpus"] / run["tokens_per_s_per_gpu"] / time


def with_factors(run: Mapping, factors: Mapping[str, float]) -> float:
    return slowness(run, replace(machine_named(run["machine"]), **factors))


def fitted(runs: Sequence[Mapping]) -> dict[str, float]:
    """The factors that predict these runs best; efficiencies are at most 1."""

    def scaled(factors: dict[str, float], name: str, by: float) -> dict[str, float] | None:
        value = factors[name] * by
        return None if name.endswith("efficiency") and value > 1.0 else factors | {name: value}

    def error(factors: dict[str, float]) -> float:
        moved = sum(math.log(factors[name] / START[name]) ** 2 for name in START)
        return sum(math.log(with_factors(run, factors)) ** 2 for run in runs) + PULL * moved

    return coordinate_descent(START, tuple(START), scaled, error)


def typical(ratios: Sequence[float]) -> float:
    return math.exp(math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios)))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['model']}-{run['machine']}-{run['precision']}")
def test_a_published_run_that_was_fitted_lies_within_the_band(run: dict) -> None:
    machine = machine_named(run["machine"])
    assert machine.error_low <= slowness(run, machine) <= machine.error_high


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_the_fit_has_not_seen_are_predicted_within_a_wider_band(family: str) -> None:
    runs = [run for run in RUNS if run["machine"] in FAMILIES[family]]
    shipped = [slowness(run, machine_named(run["machine"])) for run in runs]
    held_out = []
    for model in MODELS:
        factors = fitted([run for run in runs if run["model"] != model])
        held_out += [with_factors(run, factors) for run in runs if run["model"] == model]
    shown = (
        f"{family}, published over predicted seconds: fitted {min(shipped):.2f} to {max(shipped):.2f}, typical factor "
        f"{typical(shipped):.2f}; model held out {min(held_out):.2f} to {max(held_out):.2f}, typical factor "
        f"{typical(held_out):.2f}"
    )
    print(shown)
    low, high = HELD_OUT_BAND[family]
    assert low <= min(held_out) and max(held_out) <= high, shown
    assert typical(shipped) <= TYPICAL[family][0] and typical(held_out) <= TYPICAL[family][1], shown


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_factors_are_as_good_as_a_fit_to_all_runs(family: str) -> None:
    runs = [run for run in RUNS if run["machine"] in FAMILIES[family]]
    factors = fitted(runs)
    best = typical([with_factors(run, factors) for run in runs])
    assert typical([slowness(run, machine_named(run["machine"])) for run in runs]) <= 1.03 * best
