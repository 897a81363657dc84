"""Seconds of one collective, by how the ranks of its group are placed on the nodes.

A collective takes the bytes over the bandwidth of the slowest link that they cross, plus latency.

Ranks are numbered as in topology.py, and a node holds consecutive ranks. A group is described by its number of ranks and by the
stride between them: tensor-parallel ranks are neighbours, pipeline stages are far apart.
"""

from dataclasses import dataclass

from megatron_rl.planner.machine import Machine

BETWEEN_NODES = 3.0
"""Latency across nodes as a multiple of the latency inside a node."""


@dataclass(frozen=True)
class Group:
    """A group of `size` ranks, each `stride` after the one before."""

    size: int
    stride: int

    def members_per_node(self, domain: int) -> int:
        """Ranks of the group that share one NVLink domain of `domain` ranks."""
        return max(1, min(self.size, domain // self.stride))

    def is_inside(self, domain: int) -> bool:
        """Whether the group is inside one NVLink domain of `domain` ranks."""
        return self.size * self.stride <= domain or self.size == 1


def ring_seconds(machine: Machine, group: Group, total_bytes: float) -> float:
    """Seconds of an all-gather or reduce-scatter; an all-reduce is one of each.

    Inside a node it uses NVLink. Across nodes a ring enters and leaves each node once, and the group's ranks in a node share
    their network cards.

    Args:
        machine: The machine.
        group: The ranks.
        total_bytes: Bytes of the full tensor on each rank: the output of the all-gather, the input of the reduce-scatter.

    Returns:
        Seconds; 0 for a group of one rank.
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
    """Seconds of an all-to-all.

    What leaves the node goes over the rank's own network card.

    Args:
        machine: The machine.
        group: The ranks.
        sent_bytes: Bytes that each rank sends in total, in equal parts to all ranks of the group.

    Returns:
        Seconds; 0 for a group of one rank.
    """
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    near = group.members_per_node(machine.nvlink_domain)
    inside = sent_bytes * (near - 1) / group.size / _rate(machine, machine.nvlink_gb_s)
    outside = sent_bytes * (group.size - near) / group.size / _rate(machine, machine.network_gb_s)
    latency = machine.latency_us * 1e-6 * (1.0 if near == group.size else BETWEEN_NODES)
    return max(inside, outside) + latency


def send_seconds(machine: Machine, distance: int, sent_bytes: float) -> float:
    """Seconds of a send from one rank to another that is `distance` ranks away."""
    inside = distance < machine.nvlink_domain
    bandwidth = machine.nvlink_gb_s if inside else machine.network_gb_s
    return sent_bytes / _rate(machine, bandwidth) + machine.latency_us * 1e-6 * (1.0 if inside else BETWEEN_NODES)


def _rate(machine: Machine, gb_s: float) -> float:
    """Bytes per second that a collective reaches on a link of gb_s."""
    return gb_s * 1e9 * machine.link_efficiency
