"""A server's processes as one: it has ended when one of them has, and `stop` leaves none.

Not proved here: vLLM.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from megatron_rl.orchestrator import ServerProcess
from megatron_rl.processes import Child, Command

IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def part(folder: Path, name: str, code: str = "import time; time.sleep(600)") -> Child:
    return Child(Command(name, [sys.executable, "-c", code], folder / f"{name}.log"))


def killed(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL


def test_a_server_has_ended_when_one_of_its_parts_has(tmp_path):
    head, other = part(tmp_path, "server-0"), part(tmp_path, "server-0.1")
    server = ServerProcess([head, other], "http://127.0.0.1:1")
    assert server.why_ended() is None
    killed(other)
    assert server.why_ended() == "its part server-0.1 ended with exit code -9"
    asyncio.run(server.stop())
    assert head.poll() == -signal.SIGTERM
    assert server.why_ended() == f"ended with exit code {-signal.SIGTERM}"


def test_stopping_a_server_ends_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.orchestrator.servers.GRACE_S", 0.5)
    stubborn = part(tmp_path, "server-0.1", IGNORES_SIGTERM)
    while not (tmp_path / "server-0.1.log").read_text():
        pass
    parts = [part(tmp_path, "server-0"), stubborn, part(tmp_path, "server-0.2")]
    asyncio.run(ServerProcess(parts, "http://127.0.0.1:1").stop())
    assert [child.poll() for child in parts] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
