"""QK-clip brings the largest attention logit down to the threshold and changes nothing else, for both kinds of attention.

Not shown: Transformer Engine's measurement.
"""

import pytest
import torch

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import Setting
from tests.distributed.engine.muon_cases import Clipped, clipped, refused_clip
from tests.distributed.engine.subject import weights_of

QUERIES_AND_KEYS = {"llama": ("q_proj", "k_proj"), "deepseek_v3_moe": ("q_b_proj", "kv_b_proj")}


@pytest.mark.parametrize(
    ("model", "layouts"),
    [("llama", [Layout(4, tp=2, pp=2), Layout(4, tp=4)]), ("deepseek_v3_moe", [Layout(4, tp=2, pp=2, ep=2)])],
)
def test_the_largest_logit_comes_down_to_the_threshold(one: RankPool, four: RankPool, model: str, layouts: list[Layout]) -> None:
    largest = one.run(clipped, Setting(model), 1e9)[0].largest_logits
    assert largest[0] == largest[1] > 0.1
    # Just below the largest one: the layers before the head's own are as they were, and so is what it attends with.
    threshold = 0.97 * largest[0]
    found = one.run(clipped, Setting(model), threshold)[0]
    assert found.largest_logits == pytest.approx([largest[0], threshold], rel=1e-5)
    assert len({name.split(".")[2] for name in changed(model, found)}) == 1
    # Far below it, several heads of every layer.
    single = one.run(clipped, Setting(model), 0.4 * largest[0])[0]
    assert all(any(part in name for part in QUERIES_AND_KEYS[model]) for name in changed(model, single))
    assert len(changed(model, single)) > 4
    for layout in layouts:
        elsewhere = four.run(clipped, Setting(model, layout), 0.4 * largest[0])[0].weights
        # factors of logits that are measured within 1e-5, over two steps
        assert all(torch.allclose(elsewhere[name], weight, rtol=1e-4, atol=1e-7) for name, weight in single.weights.items())


def changed(model: str, found: Clipped) -> set[str]:
    before = weights_of(model)
    return {name for name, weight in found.weights.items() if not torch.equal(weight, before[name])}


def test_normalised_queries_are_refused_since_nothing_would_change(one: RankPool) -> None:
    (message,) = one.run(refused_clip, Setting("qwen3"))
    assert "normalises q and k" in message and "leave qk_clip out" in message
