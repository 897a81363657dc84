"""Addresses of this machine."""

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from megatron_rl.errors import UserError

_SIOCGIFADDR = 0x8915  # linux/sockios.h


class AddressError(UserError, RuntimeError):
    """A network interface that does not exist, or a host name without an address."""


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface, such as 'ib0'.

    Raises:
        AddressError: It has none; the message lists the machine's interfaces.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            there = ", ".join(sorted(p.name for p in Path("/sys/class/net").iterdir()))
            raise AddressError(
                f"slurm.interface = {name!r}: {socket.gethostname()} has no IPv4 address on it ({error.strerror}); its "
                f"interfaces: {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The network interface whose first IPv4 address this is; None where there is none."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(AddressError):  # an interface without an address
            if address_of_interface(name) == address:
                return name
    return None


def address_of_this_host() -> str:
    """The address of this machine's host name.

    Raises:
        AddressError: It has none.
    """
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise AddressError(f"the host name {name} of this machine has no address ({error}); set slurm.interface") from error
