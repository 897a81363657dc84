"""Ranks that fail are heard of, whichever they are, and the next case finds new ones."""

import pytest

from megatron_rl.engine.rank_pool import CaseFailedError, RankPool


def fails_on_the_last_rank(rank: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("this rank cannot go on")
    dist.barrier()  # that the other never enters


def number_of(rank: int) -> int:
    return rank


def test_a_rank_that_fails_while_another_waits_for_it_is_named() -> None:
    with RankPool(2) as pool:
        assert pool.run(number_of) == [0, 1]
        with pytest.raises(CaseFailedError, match=r"(?s)rank 1 of 2: .*this rank cannot go on"):
            pool.run(fails_on_the_last_rank)
        assert pool.run(number_of) == [0, 1]
