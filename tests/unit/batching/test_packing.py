"""Packing as a pure function: its invariants over random lengths and layouts."""

import numpy as np
import pytest

from megatron_rl.batching import Alignment, PackingError, alignment_of, pack
from megatron_rl.batching.packing import costs_of
from megatron_rl.topology import Layout


def random_cases():
    rng = np.random.default_rng(11)
    for _ in range(60):
        max_tokens = int(rng.integers(10, 200))
        lengths = rng.integers(1, max_tokens + 1, int(rng.integers(0, 70)))
        yield lengths.tolist(), int(rng.integers(1, 6)), max_tokens, int(rng.integers(1, 5))


@pytest.mark.parametrize(("lengths", "num_ranks", "max_tokens", "multiple"), list(random_cases()))
def test_invariants(lengths, num_ranks, max_tokens, multiple):
    packing = pack(lengths, num_ranks=num_ranks, max_tokens=max_tokens, microbatch_multiple=multiple)
    assert sorted(n for rank in packing for members in rank for n in members) == list(range(len(lengths)))  # each exactly once
    assert len(packing) == num_ranks
    (num_microbatches,) = {len(rank) for rank in packing}  # the same on every rank
    assert num_microbatches >= 1 and num_microbatches % multiple == 0
    assert all(sum(lengths[n] for n in members) <= max_tokens for rank in packing for members in rank)
    assert all(members == sorted(members) for rank in packing for members in rank)
    assert packing == pack(lengths, num_ranks=num_ranks, max_tokens=max_tokens, microbatch_multiple=multiple)
    # No more microbatches than twice what the tokens need, and one multiple: every two bins hold more than one bin's tokens.
    assert num_microbatches <= 2 * -(-sum(lengths) // (max_tokens * num_ranks)) + multiple


def test_balance_by_cost_not_by_tokens():
    """64 sequences as long-tailed as real ones: the ranks' costs, attention's square included, are within 5 %."""
    lengths = np.random.default_rng(0).lognormal(6.0, 1.0, 64).astype(int).clip(1, 8000)
    costs = costs_of(lengths, attention_length=500)
    packing = pack(lengths, num_ranks=4, max_tokens=20000, attention_length=500)
    totals = [sum(costs[n] for members in rank for n in members) for rank in packing]
    assert max(totals) / min(totals) < 1.05


def test_the_kth_microbatches_of_the_ranks_are_alike():
    """The ranks wait for each other in every microbatch, so what counts is the sum over k of the dearest k-th microbatch."""
    lengths = np.random.default_rng(1).integers(1, 100, 200)
    costs = costs_of(lengths)
    packing = pack(lengths, num_ranks=4, max_tokens=200)
    cost = np.array([[sum(costs[n] for n in members) for members in rank] for rank in packing])
    assert cost.max(0).sum() / cost.mean(0).sum() < 1.05


def test_the_dearest_microbatch_of_one_round_goes_with_the_cheapest_of_the_next():
    assert pack([10, 9, 8, 7], num_ranks=2, max_tokens=10) == [[[0], [3]], [[1], [2]]]


def test_costs_are_tokens_plus_the_square():
    np.testing.assert_allclose(costs_of(np.array([0, 100, 200]), attention_length=100), [0, 200, 600])


def test_fewer_sequences_than_microbatches_leaves_empty_ones():
    packing = pack([5], num_ranks=3, max_tokens=8, microbatch_multiple=2)
    assert [[len(members) for members in rank] for rank in packing].count([0, 0]) == 2
    assert pack([], num_ranks=2, max_tokens=8) == [[[]], [[]]]


def test_a_sequence_that_fits_nowhere_is_refused_with_its_number():
    with pytest.raises(
        PackingError, match=r"sequence 1 has 9 tokens, a microbatch holds 8: raise trainer\.max_tokens_per_microbatch"
    ):
        pack([8, 9, 3], num_ranks=2, max_tokens=8)
    assert pack([8], num_ranks=1, max_tokens=8) == [[[0]]]


@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "expected"),
    [
        (Layout(), False, Alignment(1, 1)),
        (Layout(world_size=4, tp=4), True, Alignment(1, 4)),
        (Layout(world_size=4, tp=4), False, Alignment(1, 1)),
        (Layout(world_size=2, cp=2), False, Alignment(4, 4)),
        (Layout(world_size=6, tp=2, cp=3), True, Alignment(6, 6)),
        (Layout(world_size=12, tp=4, cp=3), True, Alignment(6, 12)),
        (Layout(world_size=8, tp=4, cp=2), True, Alignment(4, 8)),
    ],
)
def test_alignment_of_a_layout(layout, sequence_parallel, expected):
    alignment = alignment_of(layout, sequence_parallel)
    assert alignment == expected
    assert alignment.total % alignment.segment == 0
    if sequence_parallel:  # each rank's share of the positions is cut again by tensor parallelism
        assert alignment.total // layout.cp % layout.tp == 0


@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "total"),
    [
        (Layout(), False, 128),
        (Layout(world_size=4, tp=4), True, 512),
        (Layout(world_size=4, tp=4), False, 128),
        (Layout(world_size=6, tp=2, cp=3), True, 768),
        (Layout(world_size=3, cp=3), False, 384),
    ],
)
def test_what_fp4_kernels_ask_for_holds_on_each_rank(layout, sequence_parallel, total):
    alignment = alignment_of(layout, sequence_parallel, 128)
    assert alignment.total == total
    assert alignment.total // layout.cp // (layout.tp if sequence_parallel else 1) % 128 == 0


def test_alignment_rounds_up():
    alignment = Alignment(segment=4, total=12)
    assert [alignment.padded(n) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [alignment.padded_total(n) for n in (0, 1, 12, 13)] == [0, 12, 12, 24]
