"""The inference servers of a run: start, health checks, restarts within a budget, and which of them get groups.

    starting ──healthy──▶ up ──synced(version)──▶ ready ──▶ ... ──▶ dead ──restart──▶ starting
                           │                        │ ▲                 └──budget spent──▶ given_up
                           └──────── suspect ◀──────┘ │  (a failed check or a failed group; no new work until one succeeds)
                                        └─────────────┘
    add() makes a new slot, or reuses that of a removed server; remove() ends a server from any state: removed

One coroutine for each server does all of its transitions; all others read `servers` and the event queue. A server that is
`up` answers, but which weights it holds is unknown until the trainer has verified them: `synced` makes it ready. The caller
passes in how a process is started and what a health check is, so this file depends neither on processes nor on the engine.

Shutdown: cancel `run()`; it stops every server that it started, then returns.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

import httpx

from megatron_rl.errors import UserError
from megatron_rl.inference.errors import ServerError
from megatron_rl.processes import PortError, ProcessError

MAX_CHECKS_PER_S = 64.0
"""Of all servers together: a check costs the orchestrator a millisecond, and a failure between two checks shows in the server's
groups at once."""

_REMOVED = "removed from the fleet"

State = Literal["starting", "up", "ready", "suspect", "dead", "given_up", "removed"]

EventKind = Literal["joined", "left", "given_up", "removed"]

GONE = frozenset({"given_up", "removed"})
"""States that a server does not leave by itself."""


class ServerHandle(Protocol):
    """A started server."""

    url: str

    def why_ended(self) -> str | None:
        """None while it runs; else how it ended, such as "ended with exit code 1"."""

    async def stop(self) -> None:
        """End it and all of its children; return when they have exited."""


@dataclass(frozen=True)
class FleetLimits:
    """When a server counts as failed, and how often it is restarted."""

    start_timeout_s: float = 600.0
    check_every_s: float = 2.0
    """Of each server; a large fleet is checked more slowly, see MAX_CHECKS_PER_S."""
    check_timeout_s: float = 10.0
    max_failed_checks: int = 3
    """Health checks in a row."""
    max_failed_groups: int = 4
    """Groups in a row that ended with a server failure, although the health check passes (an engine that hangs)."""
    max_restarts: int = 3
    """Of one server over the run."""
    restart_delay_s: float = 1.0


@dataclass(frozen=True)
class FleetEvent:
    """joined: the server answers and has to be synced.

    left: it has exited, and its requests are lost. given_up, removed: it does not come back.
    """

    kind: EventKind
    slot: int
    url: str
    reason: str = ""


@dataclass
class Server:
    """One slot of the fleet; each restart gives it a new process."""

    slot: int
    state: State = "starting"
    url: str = ""
    version: int | None = None
    """Policy version that it was verified to hold."""
    restarts: int = 0
    failed_checks: int = 0
    failed_groups: int = 0
    quarantined: str = ""
    """Why it has to be stopped; '': it does not have to be."""
    unwanted: bool = False
    """It has been removed, and is not started again."""

    @property
    def host(self) -> str:
        """The machine in its URL."""
        return host_of(self.url)


@functools.cache
def host_of(url: str) -> str:
    """The machine in a server's URL."""
    return urlsplit(url).hostname or ""


class FleetError(UserError, ValueError):
    """A server that cannot be removed."""


class Fleet:
    """`await fleet.run()` keeps `count` servers alive; events arrive in `fleet.events`.

    Args:
        count: Number of servers at the start.
        start: Starts the server of a slot and returns its handle (the server need not answer yet); raises OSError, ProcessError
            or PortError.
        check: Returns if the server at a URL is healthy, raises ServerError or an httpx.HTTPError otherwise; cancelled after
            check_timeout_s.
        limits: When a server counts as failed, and how often it is restarted.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], Awaitable[ServerHandle]],
        check: Callable[[str], Awaitable[None]],
        limits: FleetLimits = FleetLimits(),
    ) -> None:
        self.servers = [Server(slot) for slot in range(count)]
        self.events: asyncio.Queue[FleetEvent] = asyncio.Queue()
        self._start, self._check, self._limits = start, check, limits
        self._nudge = [asyncio.Event() for _ in range(count)]
        self._keepers: asyncio.TaskGroup | None = None

    @property
    def check_every_s(self) -> float:
        """Seconds between two checks of one server."""
        return max(self._limits.check_every_s, len(self.servers) / MAX_CHECKS_PER_S)

    def ready(self) -> list[Server]:
        """Servers that take new groups."""
        return [server for server in self.servers if server.state == "ready"]

    def to_sync(self, version: int) -> list[Server]:
        """Servers that answer but are not known to hold `version`."""
        return [
            server
            for server in self.servers
            if server.state in ("up", "ready", "suspect") and not server.quarantined and server.version != version
        ]

    def synced(self, url: str, version: int) -> None:
        """Record that the trainer has verified that the server holds `version`."""
        if server := self._at(url):
            server.version = version
            if server.state == "up":
                server.state = "ready"

    def quarantine(self, url: str, reason: str) -> None:
        """Give the server no more groups, stop it and restart it: its weights are unknown, or it is unfit in another way."""
        if server := self._at(url):
            server.state, server.quarantined = "suspect", reason
            self._nudge[server.slot].set()

    def is_quarantined(self, url: str) -> bool:
        """Whether its answers are discarded from now on."""
        return any(server.url == url and server.quarantined for server in self.servers)

    def group_failed(self, url: str, reason: str) -> None:
        """Record a server failure: the server is suspect until its health check passes, quarantined after several in a row."""
        if not (server := self._at(url)):
            return
        server.failed_groups += 1
        if server.failed_groups >= self._limits.max_failed_groups:
            self.quarantine(url, f"{server.failed_groups} groups in a row failed, the last with: {reason}")
            return
        if server.state == "ready":
            server.state = "suspect"
        self._nudge[server.slot].set()

    def group_succeeded(self, url: str) -> None:
        """Record a group without a server failure: the count of failures in a row is reset."""
        if server := self._at(url):
            server.failed_groups = 0

    def add(self) -> int:
        """Start one more server while the fleet runs, and return its slot. It gets groups once it is synced, like any other."""
        slot = next((s.slot for s in self.servers if s.state == "removed"), len(self.servers))
        if slot == len(self.servers):
            self.servers.append(Server(slot))
            self._nudge.append(asyncio.Event())
        self.servers[slot] = Server(slot)
        self._nudge[slot].clear()
        assert self._keepers is not None, "add() before run()"
        self._keepers.create_task(self._keep(self.servers[slot]), name=f"server-{slot}")
        return slot

    def remove(self, slot: int) -> None:
        """Stop a server at once and for good; other servers sample its groups again.

        Raises:
            FleetError: There is no such server, or it is the last one.
        """
        if not 0 <= slot < len(self.servers) or self.servers[slot].unwanted:
            there = ", ".join(str(s.slot) for s in self.servers if not s.unwanted)
            raise FleetError(f"there is no server {slot}; servers are {there}")
        if all(s.unwanted or s.state in GONE for s in self.servers if s.slot != slot):
            raise FleetError(f"server {slot} is the last one; add another before it is removed, or stop the run")
        server = self.servers[slot]
        server.unwanted = True
        if server.state == "given_up":
            server.state = "removed"
        elif server.state in ("up", "ready", "suspect"):
            self.quarantine(server.url, _REMOVED)

    async def run(self) -> None:
        """Run until cancelled, or until no server is left."""
        async with asyncio.TaskGroup() as keepers:
            self._keepers = keepers
            for server in self.servers:
                keepers.create_task(self._keep(server), name=f"server-{server.slot}")

    def _at(self, url: str) -> Server | None:
        """The live server at this URL; None when it has left."""
        return next((s for s in self.servers if s.url == url and s.state in ("up", "ready", "suspect")), None)

    async def _keep(self, server: Server) -> None:
        """Keep one server running through its restarts."""
        while True:
            reason = await self._run_once(server)
            if server.unwanted:
                break
            if server.restarts >= self._limits.max_restarts:
                server.state = "given_up"
                self._tell("given_up", server, f"{reason}; {server.restarts} restarts are used")
                return
            server.restarts += 1
            await asyncio.sleep(self._limits.restart_delay_s)
            if server.unwanted:
                break
        server.state = "removed"
        self._tell("removed", server, _REMOVED)

    async def _run_once(self, server: Server) -> str:
        """Start, watch, stop; return why the server has ended."""
        server.state, server.version, server.url = "starting", None, ""
        server.failed_checks, server.failed_groups, server.quarantined = 0, 0, ""
        try:
            handle = await self._start(server.slot)
        except (OSError, ProcessError, PortError) as error:
            server.state = "dead"
            reason = f"could not be started: {error}"
            self._tell("left", server, reason)
            return reason
        server.url = handle.url
        try:
            reason = await self._until_healthy(server, handle) or await self._until_dead(server, handle)
        finally:
            server.state = "dead"  # before the stop, which takes a while, so that it gets no more groups
            await asyncio.shield(handle.stop())
        self._tell("left", server, reason)
        return reason

    async def _until_healthy(self, server: Server, handle: ServerHandle) -> str | None:
        """Return None once the server answers, else why it did not."""
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                while (ended := handle.why_ended()) is None:
                    if server.unwanted:
                        return _REMOVED
                    if await self._fault(handle.url) is None:
                        return None
                    await asyncio.sleep(min(0.2, self._limits.check_every_s))
                return f"{ended} while starting"
        except TimeoutError:
            return f"did not answer within {self._limits.start_timeout_s:g} s (servers.start_timeout_s)"

    async def _until_dead(self, server: Server, handle: ServerHandle) -> str:
        self._join(server)
        while True:
            await self._wait_for_next_check(server)
            if (ended := handle.why_ended()) is not None:
                return ended
            if server.quarantined:
                return server.quarantined
            fault = await self._fault(handle.url)
            if fault is None:
                server.failed_checks = 0
                if server.state == "suspect" and not server.quarantined:
                    server.state = "up" if server.version is None else "ready"
                continue
            server.state, server.failed_checks = "suspect", server.failed_checks + 1
            if server.failed_checks >= self._limits.max_failed_checks:
                return f"failed {server.failed_checks} health checks in a row, the last with: {fault}"

    def _join(self, server: Server) -> None:
        server.state = "up"
        self._tell("joined", server)

    async def _wait_for_next_check(self, server: Server) -> None:
        nudge = self._nudge[server.slot]
        try:
            async with asyncio.timeout(self.check_every_s):
                await nudge.wait()
        except TimeoutError:
            pass
        nudge.clear()

    async def _fault(self, url: str) -> str | None:
        """What one health check finds wrong; None: healthy."""
        try:
            async with asyncio.timeout(self._limits.check_timeout_s):
                await self._check(url)
        except TimeoutError:
            return f"no answer within {self._limits.check_timeout_s:g} s"
        except (ServerError, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _tell(self, kind: EventKind, server: Server, reason: str = "") -> None:
        self.events.put_nowait(FleetEvent(kind, server.slot, server.url, reason))
