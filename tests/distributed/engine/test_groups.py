"""Every collective has the configured time limit: each of Megatron's groups carries it."""

import torch
from megatron.core import parallel_state

from megatron_rl.engine.groups import parallel_layout
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.topology import Layout

TIMEOUT_S = 77.0
"""Neither an integral number of minutes, which is how Megatron takes it, nor a default."""


def timeouts_of_groups(rank: int, layout: Layout) -> list[float]:
    with parallel_layout(layout, timeout_s=TIMEOUT_S):
        groups = [group for group in parallel_state._global_process_group_list if group is not None]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_every_group_has_the_time_limit(four: RankPool) -> None:
    for found in four.run(timeouts_of_groups, Layout(4, tp=2, pp=2, ep=2)):
        assert len(found) > 5 and set(found) == {TIMEOUT_S}
