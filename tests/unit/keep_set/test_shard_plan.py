"""Which token takes which route, and which rows belong to a rank: pure functions of what all ranks know."""

import dataclasses

import pytest
import torch

from megatron_rl.keep_set import KeepSets, TokenKind
from megatron_rl.keep_set.shard_plan import CPU_COSTS, GPU_COSTS, Shard, make_shard_plan, pairs_of
from tests.unit.keep_set.cases import make_sets

CPU = torch.device("cpu")


class Group:
    """Of a process group, what a shard asks."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = (lambda: rank), (lambda: size)


def sets_of(sizes: list[int], vocab_size: int) -> KeepSets:
    """Tokens whose sets are the first ids of the vocabulary."""
    kinds = torch.full((len(sizes),), TokenKind.KEEP_SET, dtype=torch.uint8)
    ids = torch.cat([torch.arange(size) for size in sizes]).int()
    return KeepSets(torch.zeros(len(sizes), dtype=torch.int64), kinds, ids, torch.tensor([0, *sizes]).cumsum(0))


@pytest.mark.parametrize(
    ("vocab_size", "shards"), [(50, [(0, 14), (14, 28), (28, 42), (42, 50)]), (20, [(0, 14), (14, 20), (20, 20), (20, 20)])]
)
def test_shards_cover_the_vocabulary_without_its_padding(vocab_size, shards):
    got = [Shard.of(14, vocab_size, Group(rank, 4)) for rank in range(4)]
    assert [(shard.first, shard.stop) for shard in got] == shards
    with pytest.raises(ValueError, match="vocab_size is 57"):
        Shard.of(14, 57, Group(0, 4))


def test_pairs_of_some_tokens():
    sets = dataclasses.replace(sets_of([2, 3, 1], 10), keep_ids=torch.tensor([5, 6, 7, 8, 9, 4], dtype=torch.int32))
    ids, owner = pairs_of(sets, torch.tensor([0, 2]))
    assert ids.tolist() == [5, 6, 4] and owner.tolist() == [0, 0, 2]


def test_ranks_divide_the_pairs_and_agree_on_the_rest():
    sets = make_sets(60, 50, [1, 2, 8, 40], torch.Generator().manual_seed(0), full=0.1)
    whole = make_shard_plan(sets, Shard.of(56, 50, None), 50, CPU)
    plans = [make_shard_plan(sets, Shard.of(14, 50, Group(rank, 4)), 50, CPU) for rank in range(4)]
    pairs = [
        (token, row + 14 * rank)
        for rank, plan in enumerate(plans)
        for token, row in zip(plan.pairs.tokens.tolist(), plan.pairs.rows.tolist(), strict=True)
    ]
    assert sorted(pairs) == sorted(zip(whole.pairs.tokens.tolist(), whole.pairs.rows.tolist(), strict=True))
    for plan in plans:
        assert all(torch.equal(getattr(plan, name), getattr(whole, name)) for name in ("wide_tokens", "full_tokens", "computed"))
        assert plan.pairs.offsets.diff().tolist() == torch.bincount(plan.pairs.tokens, minlength=60).tolist()
    assert sum(len(plan.pairs.targets) for plan in plans) == len(whole.pairs.targets)


def test_narrow_sets_go_by_pairs_and_many_wide_ones_densely():
    vocab_size = 1000
    narrow, wide = int(CPU_COSTS.dense_entry * vocab_size), vocab_size - 1
    plan = make_shard_plan(sets_of([1, 2, narrow, *[wide] * 5], vocab_size), Shard(0, vocab_size), vocab_size, CPU)
    assert plan.wide_tokens.tolist() == [3, 4, 5, 6, 7]
    assert plan.pairs.tokens.unique().tolist() == [1, 2] and plan.computed.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_one_wide_set_does_not_pay_for_a_dense_pass():
    plan = make_shard_plan(sets_of([2, 900], 1000), Shard(0, 1000), 1000, CPU)
    assert len(plan.wide_tokens) == 0 and plan.pairs.tokens.unique().tolist() == [0, 1]


def test_singletons_and_unscored_tokens_are_in_no_plan():
    plan = make_shard_plan(make_sets(20, 50, [1], torch.Generator().manual_seed(1), unscored=0.5), Shard(0, 50), 50, CPU)
    assert plan.is_empty and not len(plan.pairs.rows)


def test_a_gpu_prefers_the_dense_route_earlier():
    assert GPU_COSTS.dense_entry < CPU_COSTS.dense_entry
