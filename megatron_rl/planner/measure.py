"""Measures this machine: runs a shrunken model in several layouts, each in new processes, and fits the machine's factors.

The fit uses some of the layouts. The others are held out: their errors show how well the machine predicts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_rl.config import Config, layout_values
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.fit import SEQUENCE, Case, fitted, predicted
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.measured_ranks import RankMeasurement, measure
from megatron_rl.planner.workload import Candidate, Recompute
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping.shrink import SmallSizes, shrink_model

MEASURED = "measured"
"""Name of the fitted machine."""
LARGEST_TIME_ERROR, LARGEST_MEMORY_ERROR = 0.25, 0.10
"""Bounds on the errors of a held-out layout. Beyond them the measurement was disturbed, or the cost model is wrong."""

AGREE, FEWEST_ROUNDS, MOST_ROUNDS = 1.04, 3, 6
"""All cases run once per round, each until the times of its two fastest runs differ by less than the factor AGREE.

Other work on the machine slows it for a while; if one case ran several times in a row, the delay would be attributed to it."""

MEASURED_SIZES = SmallSizes(
    {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 4096,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "mlp_only_layers": [],
    }
)
"""Large enough that matrix products dominate a step rather than Python, small enough for a laptop."""


def _case(layout: Layout, sequences: int, sequences_at_once: int, recompute: Recompute = "none", *, fits: bool = False) -> Case:
    return Case(Candidate(layout, sequences_at_once * SEQUENCE, recompute), sequences, fits)


CASES = (
    _case(Layout(1), 16, 4, fits=True),
    _case(Layout(1), 16, 16, "full", fits=True),
    _case(Layout(2), 32, 4, fits=True),
    _case(Layout(2, tp=2), 16, 8, fits=True),
    _case(Layout(2, ep=2), 16, 4, fits=True),
    _case(Layout(2, pp=2), 32, 4, "full", fits=True),
    _case(Layout(1), 24, 8),
    _case(Layout(2, ep=2), 32, 8, "full"),
    _case(Layout(2, pp=2), 24, 4),
    _case(Layout(2, pp=2, vpp=2), 16, 4),
    _case(Layout(2, tp=2, ep=2), 16, 8),
    _case(Layout(2, tp=2, etp=2), 16, 8, "full"),
)
DENSE_CASES = tuple(case for case in CASES if case.candidate.layout.ep == case.candidate.layout.etp == 1)


@dataclass(frozen=True)
class Comparison:
    """Prediction of the fitted machine and measurement of one case."""

    case: Case
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    settled: bool = True
    """Whether the times of its two fastest runs agree."""

    @property
    def time_error(self) -> float:
        """Predicted over measured seconds, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured bytes, minus 1."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_good(self) -> bool:
        """Whether both errors are within the bounds of a held-out layout."""
        return abs(self.time_error) <= LARGEST_TIME_ERROR and abs(self.memory_error) <= LARGEST_MEMORY_ERROR


def measure_machine(
    config: Config, hf_config: Mapping[str, Any], machine: Machine, announce: Callable[[str], None]
) -> tuple[Machine, list[Comparison]]:
    """Measures this machine and fits its factors.

    Args:
        config: Configuration of a run on this machine.
        hf_config: config.json of the model, which is shrunken.
        machine: The machine with the starting values.
        announce: Called with one line before each measurement.

    Returns:
        The machine with fitted factors, and predictions and measurements of all cases.
    """
    small = shrink_model(hf_config, MEASURED_SIZES)
    counts = ParameterCounts(small)
    cases = CASES if counts.architecture.moe else DENSE_CASES
    runs: list[list[RankMeasurement]] = [[] for _ in cases]
    for number in range(1, MOST_ROUNDS + 1):
        unsettled = [
            (case, done) for case, done in zip(cases, runs, strict=True) if number <= FEWEST_ROUNDS or not _is_settled(done)
        ]
        for case, done in unsettled:
            announce(
                f"round {number}, {len(unsettled)} layouts: {case.candidate.describe()}, recompute {case.candidate.recompute}"
            )
            done.append(_run(_config_of(config, small, case.candidate), case))
    measured = [RankMeasurement(min(run.step_s for run in done), min(run.peak_bytes for run in done)) for done in runs]
    settled = [_is_settled(done) for done in runs]
    fit_cases = [(case, found) for case, found in zip(cases, measured, strict=True) if case.fits]
    machine = fitted(
        counts, replace(machine, name=MEASURED, source=f"measured: {len(fit_cases)} layouts of a shrunken model"), fit_cases
    )
    return machine, [_compare(counts, machine, *of_case) for of_case in zip(cases, measured, settled, strict=True)]


def _is_settled(runs: list[RankMeasurement]) -> bool:
    fastest, next_one = sorted(run.step_s for run in runs)[:2]
    return next_one < AGREE * fastest


def _run(config: Config, case: Case) -> RankMeasurement:
    """Time of the slowest and memory of the fullest rank.

    The processes are new, because memory that an earlier case left allocated would be counted for this one.
    """
    with TemporaryDirectory() as folder, RankPool(case.candidate.layout.world_size, Path(folder) / "log", forked=False) as pool:
        ranks = pool.run(measure, config, case.num_sequences, SEQUENCE // 2, SEQUENCE // 2)
    return RankMeasurement(max(rank.step_s for rank in ranks), max(rank.peak_bytes for rank in ranks))


def _config_of(config: Config, hf_config: Mapping[str, Any], candidate: Candidate) -> Config:
    changes: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu"},
        "model": {"path": None, "architecture": dict(hf_config), "dtype": "float32", "max_sequence_length": SEQUENCE},
        "rollouts": {"max_new_tokens": SEQUENCE // 2, "keep_set_source": "processed_logprobs", "top_k": 16, "max_keep_set": 16},
        "layout": layout_values(candidate.layout) | {"sequence_parallel": None},
        "trainer": {
            "max_tokens_per_microbatch": candidate.microbatch_tokens,
            "recompute": candidate.recompute,
            "threads_per_rank": 1,
        },
        "metrics": {"entropy_full_tokens": 0},
        "precision": {"training": "full", "rollouts": "full", "activations": "full", "backward": "full"},
    }
    return config.with_values(changes)


def _compare(counts: ParameterCounts, machine: Machine, case: Case, found: RankMeasurement, settled: bool) -> Comparison:
    seconds, size = predicted(counts, machine, case)
    return Comparison(case, seconds, found.step_s, size, float(found.peak_bytes), settled)
