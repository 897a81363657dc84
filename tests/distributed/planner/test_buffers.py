"""Predicted parameters, gradients and optimizer state against Megatron's own buffers, in bytes, on every rank."""

import pytest

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.planner import Candidate, ParameterCounts, Workload
from megatron_rl.planner.memory import static_terms
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import Setting
from tests.distributed.engine.subject import MODELS
from tests.distributed.planner.cases import buffers

SETTINGS = {
    "dp4": Setting(layout=Layout(4), dtype="bfloat16"),
    "tp2 pp2 ep2": Setting(layout=Layout(4, tp=2, pp=2, ep=2), dtype="bfloat16"),
    "tp2 etp2 ep2": Setting(layout=Layout(4, tp=2, etp=2, ep=2)),
    "pp2 vpp2 ep2": Setting(layout=Layout(4, pp=2, vpp=2, ep=2), dtype="bfloat16"),
    "tied, pp2": Setting("qwen3_moe_tied", Layout(4, pp=2), dtype="bfloat16"),
    "dense and tied, tp2": Setting("qwen3", Layout(4, tp=2)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_buffers_that_exist_from_the_first_step_on(four: RankPool, name: str) -> None:
    setting = SETTINGS[name]
    counts = ParameterCounts(MODELS[setting.model])
    work = Workload(40, 20, 20, 8, 2, parameter_bytes=2 if setting.dtype == "bfloat16" else 4)
    measured = four.run(buffers, setting)
    for stage in range(setting.layout.pp):
        first, number = stage * setting.layout.ranks_per_stage, setting.layout.ranks_per_stage
        of_stage = measured[first : first + number]
        predicted = static_terms(counts, work, Candidate(setting.layout, 40, "none"), stage)
        for rank in of_stage:
            assert rank["parameters"] == predicted["parameters"]
            assert rank["gradients"] == predicted["gradients"]
        for term in ("optimizer state", "master weights"):
            # Each rank has a piece of the buffers. Predicted is a piece without padding, and here, where parameters are small, up
            # to 5 % of every piece is padding.
            fullest = max(rank[term] for rank in of_stage)
            assert 0 <= predicted[term] - fullest <= 0.05 * predicted[term]
