"""Which worker samples which group on which server."""

from megatron_rl.orchestrator.fleet import Fleet, host_of
from megatron_rl.orchestrator.probes import Probe
from megatron_rl.orchestrator.state import RunState
from megatron_rl.records import GroupTask
from megatron_rl.wire.control import WorkRequest


class Dispatcher:
    """groups_per_server: as many as keep a server busy; more would only grow stale in its queue, and delay the probes.

    A worker gets the groups of the servers on its own host, and of hosts without a worker: were every worker to talk to
    every server, their connections would grow with the square of the nodes.
    """

    def __init__(self, state: RunState, fleet: Fleet, groups_per_server: int) -> None:
        self._state, self._fleet, self._groups_per_server = state, fleet, groups_per_server
        self._workers: dict[str, str] = {}
        """Name to host."""

    def assign(self, request: WorkRequest, probe: Probe | None) -> tuple[GroupTask, ...]:
        """Probes first, since the trainer waits for them; then groups, each to the ready server with the fewest in flight."""
        self._workers[request.worker] = request.host

        def serves(server_host: str) -> bool:
            return server_host == request.host or server_host not in self._workers.values()

        tasks: list[GroupTask] = []
        while probe and len(tasks) < request.slots and (task := probe.take(lambda url: serves(host_of(url)))):
            tasks.append(task)
        in_flight = self._state.in_flight
        near = [server for server in self._fleet.ready() if serves(server.host)]
        while len(tasks) < request.slots and (free := [s for s in near if in_flight[s.url] < self._groups_per_server]):
            server = min(free, key=lambda s: in_flight[s.url])
            assert server.version is not None, f"{server.url} is ready, so its version is verified"
            if not self._state.groups_to_begin(server.version):
                break
            tasks.append(self._state.begin(server.url, server.version))
        return tuple(tasks)

    def lose_worker(self, name: str, probe: Probe | None) -> int:
        """A worker has ended: what is in flight on servers that it served is sampled again. Returns the number of groups."""
        host = self._workers.pop(name, None)
        remaining, lost = self._workers.values(), 0
        for server in self._fleet.servers:
            if server.url and (server.host == host or server.host not in remaining):
                lost += self._state.lose_server(server.url)
                if probe:
                    probe.lose_server(server.url)
        return lost
