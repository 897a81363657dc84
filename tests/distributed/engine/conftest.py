"""The worlds that the engine's tests share: one process is the reference, four are every other layout."""

from collections.abc import Iterator

import pytest

from tests.distributed.engine.rank_pool import RankPool


@pytest.fixture(scope="session")
def one() -> Iterator[RankPool]:
    world = RankPool(1)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    world = RankPool(4)
    yield world
    world.close()
