"""The pools of ranks that all distributed tests share: one process is the reference, two and four are the layouts."""

from collections.abc import Iterator

import pytest

from megatron_rl.engine.rank_pool import RankPool


def shared_pool(size: int) -> Iterator[RankPool]:
    """Starts with the first test that uses it; ends with the session."""
    with RankPool(size) as pool:
        yield pool


@pytest.fixture(scope="session")
def one() -> Iterator[RankPool]:
    yield from shared_pool(1)


@pytest.fixture(scope="session")
def two() -> Iterator[RankPool]:
    yield from shared_pool(2)


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    yield from shared_pool(4)
