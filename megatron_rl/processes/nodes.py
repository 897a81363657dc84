"""The orchestrator's side of a cluster's nodes: a process on a node has the same interface as a local one.

    Nodes.start(node, command) ──order──▶ the node's agent ──▶ Child
        RemoteProcess.poll() ◀──/node/ended──┘

All that the orchestrator knows about a node is what its agent reports. A node whose agent has been silent for `patience_s` is
lost, and its processes with it: those that still run end when their agent ends, or when the orchestrator has not answered it for
long.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.processes.child import Command, ProcessError, log_tail
from megatron_rl.wire.control import Ack
from megatron_rl.wire.nodes import NodeOrders, NodeRequest, ProcessEnded, StartOrder, StopOrder

LOST = -9
"""Status of a process whose node is lost: as if it had been killed, which it was or will be."""


@dataclass
class Node:
    """A node whose agent has joined."""

    role: str
    index: int
    host: str
    address: str
    devices: tuple[str, ...]
    free_ports: list[int] = field(default_factory=list)
    orders: list[StartOrder | StopOrder] = field(default_factory=list)
    heard_at: float = 0.0
    """Monotonic seconds, at the beginning or end of the agent's last request."""

    def take_port(self) -> int:
        """Return a port that was free at the agent's last request; no port is returned twice.

        Raises:
            ProcessError: No port is left.
        """
        if not self.free_ports:
            raise ProcessError(f"{self.host} ({self.role} node {self.index}) has no free port left")
        return self.free_ports.pop()


class RemoteProcess:
    """A process on another node, with the interface of `Process`."""

    def __init__(self, nodes: "Nodes", node: Node, number: int, command: Command) -> None:
        self._nodes, self._node = nodes, node
        self.command, self.key = command, f"{number}:{command.name}"
        self.status: int | None = None

    @property
    def name(self) -> str:
        """Of the command."""
        return self.command.name

    def poll(self) -> int | None:
        """None while it runs, else its exit status; LOST when its node is lost."""
        if self.status is None and self._nodes.is_lost(self._node):
            self.status = LOST
        return self.status

    def terminate(self) -> None:
        """Have the agent ask it to end."""
        self._nodes.order(self._node, StopOrder(self.key, kill=False))

    def kill(self) -> None:
        """Have the agent end it, with all processes that it started."""
        self._nodes.order(self._node, StopOrder(self.key, kill=True))

    def failure(self) -> str:
        """Why it ended, for a person."""
        lost = ", whose agent is silent," if self._nodes.is_lost(self._node) else ""
        status = self.status or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        log = self.command.log_file
        return f"{self.name} on {self._node.host}{lost} {how}; the end of {log}:\n{log_tail(log)}"


class Nodes:
    """The nodes of a job, by role and index.

    Args:
        wanted: Number of nodes of each role.
        patience_s: How long an agent may be silent.
        clock: Monotonic seconds.
    """

    def __init__(
        self, wanted: Mapping[str, int], *, patience_s: float = 45.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wanted, self._patience_s, self._clock = dict(wanted), patience_s, clock
        self._nodes: dict[tuple[str, int], Node] = {}
        self._processes: dict[str, RemoteProcess] = {}
        self._changed = asyncio.Condition()
        self._over = False

    @property
    def handlers(self) -> dict[str, tuple[type, Callable]]:
        """Route to message type and handler."""
        return {"/node": (NodeRequest, self.on_node), "/node/ended": (ProcessEnded, self.on_ended)}

    async def wait_until_joined(self, timeout_s: float) -> None:
        """Wait until every node has joined.

        Raises:
            ProcessError: Names the nodes that have not joined in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not self._missing())
        except TimeoutError:
            raise ProcessError(
                f"within {timeout_s:g} s (slurm.join_timeout_s) these nodes have not joined: {', '.join(self._missing())}; see "
                "logs/agent-*.log. Where that is missing, see the job's own log: the node could not start the agent, or "
                "does not see the run's folder"
            ) from None

    def node(self, role: str, index: int) -> Node:
        """The node of this role and index.

        Raises:
            ProcessError: It has not joined, or is lost.
        """
        node = self._nodes.get((role, index))
        if node is None or self.is_lost(node):
            raise ProcessError(
                f"{role} node {index}{'' if node is None else f' ({node.host})'} is {'not there' if node is None else 'lost'}"
            )
        return node

    def start(self, node: Node, command: Command) -> RemoteProcess:
        """Have the agent start the command. One that cannot be started ends at once, with the reason in its log."""
        process = RemoteProcess(self, node, len(self._processes), command)
        self._processes[process.key] = process
        self.order(
            node,
            StartOrder(
                process.key, command.name, tuple(command.argv), str(command.log_file), int(command.stop_signal), dict(command.env)
            ),
        )
        return process

    def order(self, node: Node, order: StartOrder | StopOrder) -> None:
        """Queue an order for the node's agent."""
        node.orders.append(order)
        asyncio.get_running_loop().create_task(self._notify())

    def is_lost(self, node: Node) -> bool:
        """Whether its agent has been silent for too long."""
        return self._clock() - node.heard_at > self._patience_s

    async def on_node(self, request: NodeRequest) -> NodeOrders:
        """An agent joins, or asks for its next orders."""
        place = (request.role, request.index)
        if place not in self._nodes:
            self._nodes[place] = Node(request.role, request.index, request.host, request.address, request.devices)
            await self._notify()
        node = self._nodes[place]
        node.free_ports, node.heard_at = list(request.free_ports), self._clock()
        try:
            async with asyncio.timeout(request.wait_s), self._changed:
                await self._changed.wait_for(lambda: self._over or len(node.orders) > request.num_done)
        except TimeoutError:
            pass
        node.heard_at = self._clock()
        return NodeOrders(tuple(node.orders[request.num_done :]), leave=self._over)

    async def on_ended(self, ended: ProcessEnded) -> Ack:
        """An agent reports the end of a process."""
        if process := self._processes.get(ended.process):
            process.status = ended.status
        await self._notify()
        return Ack()

    async def stop(self, processes: Sequence[RemoteProcess], grace_s: float) -> None:
        """Ask the processes to end, and kill the rest after grace_s.

        Returns when none runs, or after another grace_s: what still runs then ends with the job.
        """
        for ending in (RemoteProcess.terminate, RemoteProcess.kill):
            for process in _running(processes):
                ending(process)
            try:
                async with asyncio.timeout(grace_s), self._changed:
                    await self._changed.wait_for(lambda: not _running(processes))
            except TimeoutError:
                continue

    async def end(self, grace_s: float) -> None:
        """Stop all processes and tell the agents to exit."""
        await self.stop(list(self._processes.values()), grace_s)
        self._over = True
        await self._notify()

    def _missing(self) -> list[str]:
        places = [(role, index) for role, count in self._wanted.items() for index in range(count)]
        return [f"{role} {index}" for role, index in places if (role, index) not in self._nodes]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _running(processes: Iterable[RemoteProcess]) -> list[RemoteProcess]:
    return [process for process in processes if process.poll() is None]
