"""The quantiles of a step's ratios are those of all ranks' tokens, each counted once."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.objective import ratio_counts, ratio_quantiles
from megatron_rl.trainer.scored import step_ratio_quantiles


def differences(rank: int, microbatch: int) -> torch.Tensor:
    """f32: rank 1 has more tokens, and other ratios, than rank 0."""
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(30 + 50 * rank + microbatch, generator=generator) * 0.1 + rank


def quantiles(rank: int, speaking: set[int]) -> dict[str, float]:
    of_updates = [
        SimpleNamespace(ratio_counts=[ratio_counts(differences(rank, n)) for n in numbers]) for numbers in ((0, 1), (2,))
    ]
    return step_ratio_quantiles(of_updates, rank in speaking, torch.device("cpu"))


@pytest.mark.parametrize("speaking", [{0, 1}, {1}], ids=["data parallel", "pipeline"])
def test_each_token_of_the_step_counts_once(two: RankPool, speaking: set[int]) -> None:
    of_all = torch.cat([differences(rank, n) for rank in speaking for n in range(3)])
    assert two.run(quantiles, speaking) == [ratio_quantiles(ratio_counts(of_all))] * 2
