"""The fleet's transitions, with servers that are plain objects and a health check that reads them."""

import asyncio
import contextlib

import pytest

from megatron_rl.inference.errors import ServerError
from megatron_rl.orchestrator.fleet import Fleet, FleetError, FleetLimits

QUICK = FleetLimits(
    start_timeout_s=0.5, check_every_s=0.01, check_timeout_s=0.05, max_failed_checks=2, max_failed_groups=2, max_restarts=2, restart_delay_s=0.0
)  # fmt: skip


class FakeServer:
    def __init__(self, url: str):
        self.url, self.code, self.healthy, self.stopped = url, None, True, False

    def poll(self) -> int | None:
        return self.code

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        self.stopped = True


class World:
    """Starts fake servers; `lives[slot]` are those of one slot in order."""

    def __init__(self, count: int = 1, limits: FleetLimits = QUICK, prepare=lambda server, life: None):
        self.lives: list[list[FakeServer]] = [[] for _ in range(count)]
        self.prepare = prepare
        self.fleet = Fleet(count, self.start, self.check, limits)

    async def start(self, slot: int) -> FakeServer:
        self.lives += [[] for _ in range(slot + 1 - len(self.lives))]
        server = FakeServer(f"http://slot{slot}:{len(self.lives[slot])}")
        self.prepare(server, len(self.lives[slot]))
        self.lives[slot].append(server)
        return server

    async def check(self, url: str) -> None:
        server = next(s for lives in self.lives for s in lives if s.url == url)
        if server.healthy == "hangs":
            await asyncio.sleep(60)
        if not server.healthy:
            raise ServerError(url, "GET /health", "503")

    async def next_events(self, number: int):
        return [await asyncio.wait_for(self.fleet.events.get(), 5) for _ in range(number)]


def play(scenario, world: World) -> None:
    async def body():
        task = asyncio.create_task(world.fleet.run())
        try:
            await asyncio.wait_for(scenario(world), 10)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert all(s.stopped or s.code is not None for lives in world.lives for s in lives), "a server is left behind"

    asyncio.run(body())


def test_a_server_is_ready_only_when_its_weights_are_verified():
    async def scenario(world):
        (event, _) = await world.next_events(2)
        assert event.kind == "joined" and world.fleet.ready() == []
        assert [s.slot for s in world.fleet.to_sync(3)] == [0, 1]
        world.fleet.synced("http://slot1:0", 3)
        assert [(s.slot, s.version) for s in world.fleet.ready()] == [(1, 3)]
        assert [s.slot for s in world.fleet.to_sync(3)] == [0] and len(world.fleet.to_sync(4)) == 2

    play(scenario, World(count=2))


def test_a_dead_process_leaves_and_comes_back_without_a_version():
    async def scenario(world):
        await world.next_events(1)
        world.fleet.synced("http://slot0:0", 7)
        world.lives[0][0].code = -9
        left, joined = await world.next_events(2)
        assert (left.kind, left.url, left.reason) == ("left", "http://slot0:0", "ended with exit code -9")
        assert joined.kind == "joined" and joined.url == "http://slot0:1"
        assert world.fleet.ready() == [] and world.fleet.servers[0].version is None

    play(scenario, World())


def test_restarts_are_bounded():
    async def scenario(world):
        events = await world.next_events(4)
        assert [e.kind for e in events] == ["left", "left", "left", "given_up"]
        assert events[0].reason == "ended with exit code 1 while starting" and "2 restarts are used up" in events[-1].reason
        assert world.fleet.servers[0].state == "given_up" and len(world.lives[0]) == 3

    play(scenario, World(prepare=lambda server, life: setattr(server, "code", 1) or setattr(server, "healthy", False)))


def test_a_server_that_never_answers_is_stopped():
    async def scenario(world):
        (left, joined) = await world.next_events(2)
        assert "did not answer within 0.5 s" in left.reason and joined.kind == "joined"
        assert world.lives[0][0].stopped

    play(scenario, World(prepare=lambda server, life: setattr(server, "healthy", True if life else "hangs")))


def test_one_failed_check_makes_suspect_and_a_passed_one_ready_again():
    async def scenario(world):
        await world.next_events(1)
        world.fleet.synced("http://slot0:0", 1)
        world.lives[0][0].healthy = False
        while world.fleet.servers[0].state == "ready":
            await asyncio.sleep(0.001)
        assert world.fleet.servers[0].state == "suspect" and world.fleet.ready() == []
        world.lives[0][0].healthy = True
        while not world.fleet.ready():
            await asyncio.sleep(0.001)
        assert world.fleet.ready()[0].version == 1

    play(scenario, World(limits=FleetLimits(**{**vars(QUICK), "max_failed_checks": 100})))


def test_hanging_health_checks_end_the_server():
    async def scenario(world):
        await world.next_events(1)
        world.lives[0][0].healthy = "hangs"
        (left,) = await world.next_events(1)
        assert left.reason == "failed 2 health checks in a row, the last by: no answer within 0.05 s"

    play(scenario, World())


def test_failed_groups_in_a_row_condemn_although_the_check_passes():
    async def scenario(world):
        await world.next_events(1)
        world.fleet.synced("http://slot0:0", 1)
        world.fleet.group_failed("http://slot0:0", "timeout")
        assert world.fleet.ready() == []
        while not world.fleet.ready():
            await asyncio.sleep(0.001)
        world.fleet.group_succeeded("http://slot0:0")
        world.fleet.group_failed("http://slot0:0", "timeout")
        world.fleet.group_failed("http://slot0:0", "timeout")
        (left,) = await world.next_events(1)
        assert left.reason == "2 groups in a row failed, the last by: timeout"

    play(scenario, World())


def test_a_condemned_server_takes_no_work_and_late_reports_about_it_are_ignored():
    async def scenario(world):
        await world.next_events(1)
        world.fleet.condemn("http://slot0:0", "checksum differs")
        assert world.fleet.ready() == []
        left, joined = await world.next_events(2)
        assert left.reason == "checksum differs" and joined.url == "http://slot0:1"
        world.fleet.synced("http://slot0:0", 5)
        world.fleet.group_failed("http://slot0:0", "late")
        assert world.fleet.servers[0].version is None and world.fleet.servers[0].failed_groups == 0

    play(scenario, World())


def test_a_start_that_fails_counts_as_a_restart():
    world = World()
    real_start = world.start

    async def start(slot):
        if not world.lives[slot] and world.fleet.servers[slot].restarts == 0:
            raise OSError("no such program")
        return await real_start(slot)

    world.fleet._start = start

    async def scenario(world):
        left, joined = await world.next_events(2)
        assert left.reason == "could not be started: no such program" and joined.kind == "joined"
        assert world.fleet.servers[0].restarts == 1

    play(scenario, world)


async def state_of(world, slot, state):
    while world.fleet.servers[slot].state != state:
        await asyncio.sleep(0.001)


def test_a_server_that_is_added_has_to_be_synced_before_it_takes_work():
    async def scenario(world):
        await world.next_events(1)
        world.fleet.synced("http://slot0:0", 4)
        assert world.fleet.add() == 1
        (joined,) = await world.next_events(1)
        assert (joined.kind, joined.url) == ("joined", "http://slot1:0")
        assert [s.slot for s in world.fleet.ready()] == [0] and [s.slot for s in world.fleet.to_sync(4)] == [1]
        world.fleet.synced("http://slot1:0", 4)
        assert [s.slot for s in world.fleet.ready()] == [0, 1]

    play(scenario, World())


def test_a_server_that_is_removed_is_stopped_for_good_and_its_slot_can_be_taken_again():
    async def scenario(world):
        await world.next_events(2)
        world.fleet.synced("http://slot0:0", 1)
        world.fleet.remove(0)
        assert world.fleet.ready() == []  # at once, before its process has ended
        left, removed = await world.next_events(2)
        assert (left.kind, left.url, removed.kind) == ("left", "http://slot0:0", "removed")
        assert world.lives[0][0].stopped and world.fleet.servers[0].state == "removed"
        assert world.fleet.add() == 0
        (joined,) = await world.next_events(1)
        assert joined.url == "http://slot0:1" and world.fleet.servers[0].version is None

    play(scenario, World(count=2))


def test_a_server_can_be_removed_while_it_starts():
    async def scenario(world):
        while not world.lives[0]:
            await asyncio.sleep(0.001)
        world.fleet.remove(0)
        await state_of(world, 0, "removed")
        assert world.lives[0][0].stopped and len(world.lives[0]) == 1

    play(scenario, World(count=2, prepare=lambda server, life: setattr(server, "healthy", "slot1" in server.url)))


def test_the_last_server_and_one_that_is_not_there_are_not_removed():
    async def scenario(world):
        await world.next_events(2)
        world.fleet.remove(1)
        with pytest.raises(FleetError, match="server 0 is the last one; add another before it is removed, or stop the run"):
            world.fleet.remove(0)
        for slot in (1, 2):
            with pytest.raises(FleetError, match=f"there is no server {slot}; servers are 0"):
                world.fleet.remove(slot)

    play(scenario, World(count=2))
