"""The fleet's transitions, with servers that are plain objects and a health check that reads them."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from megatron_rl.inference.errors import ServerError
from megatron_rl.orchestrator.fleet import Fleet, FleetError, FleetLimits

QUICK = FleetLimits(
    start_timeout_s=60,
    check_every_s=0.01,
    check_timeout_s=60,
    max_failed_checks=2,
    max_failed_groups=2,
    max_restarts=2,
    restart_delay_s=0.0,
)

SHORT_CHECKS = replace(QUICK, start_timeout_s=1.0, check_timeout_s=0.05)
"""For servers that hang: these limits are waited for. Those above are long, for a machine that does other things."""


class FakeServer:
    def __init__(self, url: str) -> None:
        self.url, self.code, self.healthy, self.stopped = url, None, True, False

    def why_ended(self) -> str | None:
        return None if self.code is None else f"ended with exit code {self.code}"

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        self.stopped = True


class FakeServers:
    """Starts fake servers; `starts[slot]` are those of one slot in order."""

    def __init__(self, count: int = 1, limits: FleetLimits = QUICK, prepare=lambda server, start: None) -> None:
        self.starts: list[list[FakeServer]] = [[] for _ in range(count)]
        self.prepare = prepare
        self.fleet = Fleet(count, self.start, self.check, limits)

    async def start(self, slot: int) -> FakeServer:
        self.starts += [[] for _ in range(slot + 1 - len(self.starts))]
        server = FakeServer(f"http://slot{slot}:{len(self.starts[slot])}")
        self.prepare(server, len(self.starts[slot]))
        self.starts[slot].append(server)
        return server

    async def check(self, url: str) -> None:
        server = next(s for starts in self.starts for s in starts if s.url == url)
        if server.healthy == "hangs":
            await asyncio.sleep(60)
        if not server.healthy:
            raise ServerError(url, "GET /health", "503")

    async def next_events(self, number: int):
        return [await asyncio.wait_for(self.fleet.events.get(), 60) for _ in range(number)]


def play(scenario, servers: FakeServers) -> None:
    async def body():
        task = asyncio.create_task(servers.fleet.run())
        try:
            await asyncio.wait_for(scenario(servers), 60)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert all(s.stopped or s.code is not None for starts in servers.starts for s in starts), "a server is left running"

    asyncio.run(body())


def test_a_server_is_ready_only_when_its_weights_are_verified():
    async def scenario(servers):
        (event, _) = await servers.next_events(2)
        assert event.kind == "joined" and servers.fleet.ready() == []
        assert [s.slot for s in servers.fleet.to_sync(3)] == [0, 1]
        servers.fleet.synced("http://slot1:0", 3)
        assert [(s.slot, s.version) for s in servers.fleet.ready()] == [(1, 3)]
        assert [s.slot for s in servers.fleet.to_sync(3)] == [0] and len(servers.fleet.to_sync(4)) == 2

    play(scenario, FakeServers(count=2))


def test_a_dead_process_leaves_and_comes_back_without_a_version():
    async def scenario(servers):
        await servers.next_events(1)
        servers.fleet.synced("http://slot0:0", 7)
        servers.starts[0][0].code = -9
        left, joined = await servers.next_events(2)
        assert (left.kind, left.url, left.reason) == ("left", "http://slot0:0", "ended with exit code -9")
        assert joined.kind == "joined" and joined.url == "http://slot0:1"
        assert servers.fleet.ready() == [] and servers.fleet.servers[0].version is None

    play(scenario, FakeServers())


def test_restarts_are_bounded():
    async def scenario(servers):
        events = await servers.next_events(4)
        assert [e.kind for e in events] == ["left", "left", "left", "given_up"]
        assert events[0].reason == "ended with exit code 1 while starting" and "2 restarts are used" in events[-1].reason
        assert servers.fleet.servers[0].state == "given_up" and len(servers.starts[0]) == 3

    play(scenario, FakeServers(prepare=lambda server, start: setattr(server, "code", 1) or setattr(server, "healthy", False)))


def test_a_server_that_never_answers_is_stopped():
    async def scenario(servers):
        (left, joined) = await servers.next_events(2)
        assert "did not answer within 1 s" in left.reason and joined.kind == "joined"
        assert servers.starts[0][0].stopped

    hangs_at_first = FakeServers(
        limits=SHORT_CHECKS, prepare=lambda server, start: setattr(server, "healthy", True if start else "hangs")
    )
    play(scenario, hangs_at_first)


def test_one_failed_check_makes_suspect_and_a_passed_one_ready_again():
    async def scenario(servers):
        await servers.next_events(1)
        servers.fleet.synced("http://slot0:0", 1)
        servers.starts[0][0].healthy = False
        while servers.fleet.servers[0].state == "ready":
            await asyncio.sleep(0.001)
        assert servers.fleet.servers[0].state == "suspect" and servers.fleet.ready() == []
        servers.starts[0][0].healthy = True
        while not servers.fleet.ready():
            await asyncio.sleep(0.001)
        assert servers.fleet.ready()[0].version == 1

    play(scenario, FakeServers(limits=replace(QUICK, max_failed_checks=100)))


def test_hanging_health_checks_end_the_server():
    async def scenario(servers):
        await servers.next_events(1)
        servers.starts[0][0].healthy = "hangs"
        (left,) = await servers.next_events(1)
        assert left.reason == "failed 2 health checks in a row, the last with: no answer within 0.05 s"

    play(scenario, FakeServers(limits=SHORT_CHECKS))


def test_failed_groups_in_a_row_quarantine_although_the_check_passes():
    async def scenario(servers):
        await servers.next_events(1)
        servers.fleet.synced("http://slot0:0", 1)
        servers.fleet.group_failed("http://slot0:0", "timeout")
        assert servers.fleet.ready() == []
        while not servers.fleet.ready():
            await asyncio.sleep(0.001)
        servers.fleet.group_succeeded("http://slot0:0")
        servers.fleet.group_failed("http://slot0:0", "timeout")
        servers.fleet.group_failed("http://slot0:0", "timeout")
        (left,) = await servers.next_events(1)
        assert left.reason == "2 groups in a row failed, the last with: timeout"

    play(scenario, FakeServers())


def test_a_quarantined_server_takes_no_work_and_late_reports_about_it_are_ignored():
    async def scenario(servers):
        await servers.next_events(1)
        servers.fleet.quarantine("http://slot0:0", "checksum differs")
        assert servers.fleet.ready() == []
        left, joined = await servers.next_events(2)
        assert left.reason == "checksum differs" and joined.url == "http://slot0:1"
        servers.fleet.synced("http://slot0:0", 5)
        servers.fleet.group_failed("http://slot0:0", "late")
        assert servers.fleet.servers[0].version is None and servers.fleet.servers[0].failed_groups == 0

    play(scenario, FakeServers())


def test_a_start_that_fails_counts_as_a_restart():
    servers = FakeServers()
    real_start = servers.start

    async def start(slot):
        if not servers.starts[slot] and servers.fleet.servers[slot].restarts == 0:
            raise OSError("no such program")
        return await real_start(slot)

    servers.fleet._start = start

    async def scenario(servers):
        left, joined = await servers.next_events(2)
        assert left.reason == "could not be started: no such program" and joined.kind == "joined"
        assert servers.fleet.servers[0].restarts == 1

    play(scenario, servers)


async def state_of(servers, slot, state):
    while servers.fleet.servers[slot].state != state:
        await asyncio.sleep(0.001)


def test_a_server_that_is_added_has_to_be_synced_before_it_takes_work():
    async def scenario(servers):
        await servers.next_events(1)
        servers.fleet.synced("http://slot0:0", 4)
        assert servers.fleet.add() == 1
        (joined,) = await servers.next_events(1)
        assert (joined.kind, joined.url) == ("joined", "http://slot1:0")
        assert [s.slot for s in servers.fleet.ready()] == [0] and [s.slot for s in servers.fleet.to_sync(4)] == [1]
        servers.fleet.synced("http://slot1:0", 4)
        assert [s.slot for s in servers.fleet.ready()] == [0, 1]

    play(scenario, FakeServers())


def test_a_server_that_is_removed_is_stopped_for_good_and_its_slot_can_be_taken_again():
    async def scenario(servers):
        await servers.next_events(2)
        servers.fleet.synced("http://slot0:0", 1)
        servers.fleet.remove(0)
        assert servers.fleet.ready() == []  # at once, before its process has ended
        left, removed = await servers.next_events(2)
        assert (left.kind, left.url, removed.kind) == ("left", "http://slot0:0", "removed")
        assert servers.starts[0][0].stopped and servers.fleet.servers[0].state == "removed"
        assert servers.fleet.add() == 0
        (joined,) = await servers.next_events(1)
        assert joined.url == "http://slot0:1" and servers.fleet.servers[0].version is None

    play(scenario, FakeServers(count=2))


def test_a_server_can_be_removed_while_it_starts():
    async def scenario(servers):
        while not servers.starts[0]:
            await asyncio.sleep(0.001)
        servers.fleet.remove(0)
        await state_of(servers, 0, "removed")
        assert servers.starts[0][0].stopped and len(servers.starts[0]) == 1

    play(scenario, FakeServers(count=2, prepare=lambda server, start: setattr(server, "healthy", "slot1" in server.url)))


def test_the_last_server_and_one_that_is_not_there_are_not_removed():
    async def scenario(servers):
        await servers.next_events(2)
        servers.fleet.remove(1)
        with pytest.raises(FleetError, match="server 0 is the last one; add another before it is removed, or stop the run"):
            servers.fleet.remove(0)
        for slot in (1, 2):
            with pytest.raises(FleetError, match=f"there is no server {slot}; servers are 0"):
                servers.fleet.remove(slot)

    play(scenario, FakeServers(count=2))
