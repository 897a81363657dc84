"""TCP ports on this machine: free ones, and whether one is taken."""

import socket


class PortError(RuntimeError):
    """A port that is in use, or cannot be listened on."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that nobody listens on now. Held open together, so that none is returned twice."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def check_port(host: str, port: int, wanted_for: str) -> None:
    """Raise PortError unless host:port can be listened on."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise PortError(f"{wanted_for}: {host}:{port} cannot be listened on ({error.strerror}); choose another, or 0 for a free one") from error
