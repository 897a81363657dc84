"""Which worker samples which group on which server."""

from megatron_rl.orchestrator.fleet import Fleet, host_of
from megatron_rl.orchestrator.probes import Probe
from megatron_rl.orchestrator.state import RunState
from megatron_rl.records import GroupTask
from megatron_rl.wire.control import WorkRequest


class Dispatcher:
    """Assigns groups to workers and servers.

    A worker gets the groups of the servers on its own host, and of hosts without a worker: if every worker talked to
    every server, their connections would grow with the square of the nodes.

    Args:
        state: Of the run.
        fleet: The servers.
        groups_per_server: As many as keep a server busy; more would only grow stale in its queue, and delay the probes.
    """

    def __init__(self, state: RunState, fleet: Fleet, groups_per_server: int) -> None:
        self._state, self._fleet, self._groups_per_server = state, fleet, groups_per_server
        self._workers: dict[str, str] = {}
        """Name to host."""

    def assign(self, request: WorkRequest, probe: Probe | None) -> tuple[GroupTask, ...]:
        """Choose the groups that a worker samples next.

        Probes come first, since the trainer waits for them; then groups, each for the ready server with the fewest in flight.

        Args:
            request: Of the worker: its name, host, and number of free slots.
            probe: The probe in progress; None: there is none.

        Returns:
            At most `request.slots` groups.
        """
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
        """Have the groups in flight on the servers of a worker that has ended sampled again, and return their number."""
        host = self._workers.pop(name, None)
        remaining, lost = self._workers.values(), 0
        for server in self._fleet.servers:
            if server.url and (server.host == host or server.host not in remaining):
                lost += self._state.lose_server(server.url)
                if probe:
                    probe.lose_server(server.url)
        return lost
