"""The worlds that the engine's tests share: one process is the reference, four are every other layout."""

from collections.abc import Iterator

import pytest

from tests.distributed.engine.world import World


@pytest.fixture(scope="session")
def one() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()
