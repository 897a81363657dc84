"""torch.distributed's stores, each listening on the one address that its clients are given."""

# Annotations stay text: the functions that need torch load it.
from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


def serve_store(host: str, timeout_s: float, listener: socket.socket | None = None) -> dist.TCPStore:
    """A store of this process, listening on `host` only, at a free port (`.port`).

    torch binds a store to every interface of the machine, at a port that has to be chosen before. Whoever reaches a store can
    take part in the rendezvous, so the socket is bound here, to the one address that the others are given, and is never released.

    Args:
        host: The address to listen on.
        timeout_s: Timeout of every wait for a key.
        listener: A socket that already listens there; it becomes the store's.
    """
    import torch.distributed as dist

    listener = listener or socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another process serves."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def num_connections(port: int) -> int:
    """How many clients are connected to a listening port of this machine, this process's own among them.

    A store does not say who waits at it, so the kernel is asked.
    """
    established = "01"
    connections: set[tuple[str, str]] = set()  # while connections come and go, the kernel may list one twice
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a machine without IPv6
            continue
        for line in lines:
            _, local, remote, state, *_ = line.split()
            if state == established and int(local.rpartition(":")[2], 16) == port:
                connections.add((local, remote))
    return len(connections)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the route to (host, port); connecting a datagram socket sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
