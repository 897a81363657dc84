"""Context parallelism beyond what test_parity shows: objectives over complete sequences, metrics, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import Setting
from tests.distributed.engine.step_cases import sequence_level_step, step_with_an_unpadded_sequence
from tests.distributed.engine.test_parity import assert_same_gradients


def refusal_on_a_gpu(rank: int, model: dict[str, Any]) -> str:
    from megatron_rl.engine.errors import UnsupportedModelError
    from megatron_rl.engine.model import Backend, check_supported
    from megatron_rl.weight_mapping import ParameterTable

    backend = Backend(transformer_engine=True, apex_gradient_fusion=False)
    try:
        check_supported(ParameterTable(model).architecture, Setting(layout=Layout(2, cp=2)).config(), backend)
    except UnsupportedModelError as error:
        return str(error)
    return "nothing"


def test_what_transformer_engine_cannot_cut_is_refused_on_a_gpu(one: RankPool) -> None:
    models = json.loads((Path(__file__).parents[2] / "data" / "small_families.json").read_text())
    assert "layout.context = 2" in one.run(refusal_on_a_gpu, models["gpt_oss_moe"])[0]
    assert one.run(refusal_on_a_gpu, models["deepseek_v3_moe"]) == ["nothing"]


def test_a_sequence_on_several_ranks_counts_as_one_sequence(one: RankPool, four: RankPool) -> None:
    """One data-parallel replica on both sides, so that the microbatches and the tokens sampled for the entropy are the same."""
    gradients, metrics = one.run(sequence_level_step, Setting())[0]
    for layout in (Layout(4, cp=4), Layout(4, tp=2, cp=2, ep=2)):
        found = four.run(sequence_level_step, Setting(layout=layout))
        assert_same_gradients(found[0][0], gradients)
        for name in ("loss", "entropy_full", "entropy_keep_set", "singleton_share", "grad_norm"):
            assert all(of_rank[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6) for _, of_rank in found), name


def test_sequences_that_cannot_be_cut_are_refused(four: RankPool) -> None:
    for message in four.run(step_with_an_unpadded_sequence, Setting(layout=Layout(4, cp=2), routing_replay=False)):
        assert "with context parallelism they must be multiples of 4" in message
