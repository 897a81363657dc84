"""Stores that listen on one address; who is connected to them."""

import socket
import time
from pathlib import Path

from megatron_rl.wire.stores import join_store, num_connections, serve_store


def count_reaches(port: int, count: int) -> bool:
    deadline = time.monotonic() + 20
    while num_connections(port) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return num_connections(port) == count


def test_the_clients_of_a_store_are_counted():
    store = serve_store("127.0.0.1", 20)
    assert count_reaches(store.port, 1), "the server's own"
    clients = [join_store("127.0.0.1", store.port, 20) for _ in range(3)]
    assert count_reaches(store.port, 4)
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()):
        assert num_connections(store.port) == 4
    clients.pop()
    assert count_reaches(store.port, 3)


def test_a_connection_that_the_kernel_lists_twice_counts_once(monkeypatch):
    row = "   0: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0000 20 4 30 10 -1"
    listening = (
        "   1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0000 20 4 30 10 -1"
    )
    table = "\n".join(["  sl  local_address", row, listening, row, row.replace("C350", "C351")])
    monkeypatch.setattr(Path, "read_text", lambda path: table)
    assert num_connections(0x1F90) == 2
