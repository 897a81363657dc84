"""Any rank that fails is reported, and the next case runs on new ranks."""

import pytest

from megatron_rl.engine.rank_pool import CaseFailedError, RankPool


def fails_on_the_last_rank(rank: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("this rank cannot continue")
    dist.barrier()  # that the other never enters


def number_of(rank: int) -> int:
    return rank


def test_a_rank_that_fails_while_another_waits_for_it_is_named() -> None:
    with RankPool(2) as pool:
        assert pool.run(number_of) == [0, 1]
        with pytest.raises(CaseFailedError, match=r"(?s)rank 1 of 2: .*this rank cannot continue"):
            pool.run(fails_on_the_last_rank)
        assert pool.run(number_of) == [0, 1]
