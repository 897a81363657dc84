"""Seconds of one collective, by how its group lies on the nodes.

Bandwidth of the slowest link that every rank's share crosses, plus latency.

Ranks are numbered as in topology.py, a node holds consecutive ranks. A group is described by its number of ranks and by their
distance: tensor-parallel ranks are neighbours, pipeline stages lie far apart.
"""

from dataclasses import dataclass

from megatron_rl.planner.machine import Machine

BETWEEN_NODES = 3.0
"""Latency across nodes, in latencies inside one."""


@dataclass(frozen=True)
class Group:
    """`size` ranks, each `stride` after the one before."""

    size: int
    stride: int

    def members_per_node(self, domain: int) -> int:
        """How many of them share a NVLink domain."""
        return max(1, min(self.size, domain // self.stride))

    def is_inside(self, domain: int) -> bool:
        """Whether the group lies in one NVLink domain."""
        return self.size * self.stride <= domain or self.size == 1


def ring_seconds(machine: Machine, group: Group, total_bytes: float) -> float:
    """All-gather or reduce-scatter of total_bytes (the whole tensor, on each rank).

    An all-reduce is one of each.

    Inside a node over NVLink. Across nodes a ring enters and leaves each node once, and the members of a node share
    their network cards.
    """
    if group.size == 1 or total_bytes == 0:
        return 0.0
    share = total_bytes * (group.size - 1) / group.size
    if group.is_inside(machine.nvlink_domain):
        return share / _rate(machine, machine.nvlink_gb_s) + machine.latency_us * 1e-6
    cards = group.members_per_node(machine.nvlink_domain)
    bandwidth = min(machine.nvlink_gb_s, machine.network_gb_s * cards)
    return share / _rate(machine, bandwidth) + BETWEEN_NODES * machine.latency_us * 1e-6


def exchange_seconds(machine: Machine, group: Group, sent_bytes: float) -> float:
    """All-to-all: each rank sends sent_bytes in all, equal parts to each rank.

    What leaves the node goes over its own network card.
    """
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    near = group.members_per_node(machine.nvlink_domain)
    inside = sent_bytes * (near - 1) / group.size / _rate(machine, machine.nvlink_gb_s)
    outside = sent_bytes * (group.size - near) / group.size / _rate(machine, machine.network_gb_s)
    latency = machine.latency_us * 1e-6 * (1.0 if near == group.size else BETWEEN_NODES)
    return max(inside, outside) + latency


def send_seconds(machine: Machine, distance: int, sent_bytes: float) -> float:
    """From one rank to another that many ranks away."""
    inside = distance < machine.nvlink_domain
    bandwidth = machine.nvlink_gb_s if inside else machine.network_gb_s
    return sent_bytes / _rate(machine, bandwidth) + machine.latency_us * 1e-6 * (1.0 if inside else BETWEEN_NODES)


def _rate(machine: Machine, gb_s: float) -> float:
    """Bytes a second that a collective reaches."""
    return gb_s * 1e9 * machine.link_efficiency
