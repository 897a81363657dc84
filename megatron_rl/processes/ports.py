"""TCP ports on this machine: which are free."""

import contextlib
import random
import socket

from megatron_rl.errors import UserError


class PortError(UserError, RuntimeError):
    """A port that is in use, or cannot be listened on."""


_RANGE = range(20000, 32768)
"""Below the ports of outgoing connections, one of which could take a port before the server has bound it."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Choose `count` different ports on which no process listens now; at random, so that two programs rarely choose the same.

    Raises:
        PortError: Fewer are free.
    """
    ports: list[int] = []
    for port in random.sample(_RANGE, len(_RANGE)):
        if len(ports) == count:
            return ports
        with contextlib.suppress(PortError):
            check_port(host, port, "a free port")
            ports.append(port)
    raise PortError(f"{count} ports were asked for, {len(ports)} of {_RANGE.start}..{_RANGE.stop - 1} are free on {host}")


def check_host(host: str, wanted_for: str) -> None:
    """Return if this machine can listen on the host.

    Args:
        host: Name or address.
        wanted_for: The option or value that names it, for the message.

    Raises:
        PortError: It is not an address of this machine.
    """
    if not host:
        raise PortError(f"{wanted_for} = '': would listen on every address of this machine; use 127.0.0.1, for example")
    try:
        check_port(host, 0, wanted_for)
    except PortError as error:
        raise PortError(
            f"{wanted_for} = '{host}': is not an address of this machine ({error.__cause__}); use 127.0.0.1, for example"
        ) from error


def check_port(host: str, port: int, wanted_for: str) -> None:
    """Return if this machine can listen on host:port.

    Args:
        host: Name or address.
        port: 0: any.
        wanted_for: The option or value that names it, for the message.

    Raises:
        PortError: The port is in use, or the host is not an address of this machine.
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise PortError(
                f"{wanted_for}: {host}:{port} is not free to listen on ({error.strerror}); choose another, or 0 for a free one"
            ) from error
