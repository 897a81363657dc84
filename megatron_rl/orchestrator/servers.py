"""The fleet's servers as local processes: how one starts, and what a health check is."""

import asyncio

import httpx

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator.commands import server_process
from megatron_rl.processes import Child, check_port, free_ports
from megatron_rl.rollouts.fleet import Fleet, FleetLimits

GRACE_S = 5.0


class LocalServer:
    """A vLLM server on this machine."""

    def __init__(self, child: Child, url: str):
        self.child, self.url = child, url

    def poll(self) -> int | None:
        return self.child.poll()

    async def stop(self) -> None:
        self.child.terminate()
        deadline = asyncio.get_running_loop().time() + GRACE_S
        while self.child.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self.child.kill()


def local_fleet(config: Config, folder: RunFolder, key: str) -> Fleet:
    """A fleet that starts config.servers.count servers, each again on the same port when one was asked for."""
    lives = [0] * config.servers.count
    http = httpx.AsyncClient(timeout=None)  # the fleet cuts a check off by itself

    async def start(slot: int) -> LocalServer:
        host, first = config.servers.host, config.servers.first_port
        if first:
            check_port(host, first + slot, f"servers.first_port, server {slot}")
        port = first + slot if first else free_ports(1, host)[0]
        child = Child(server_process(config, folder, slot, port, lives[slot], key))
        lives[slot] += 1
        return LocalServer(child, f"http://{host}:{port}")

    async def check(url: str) -> None:
        (await http.get(f"{url}/health")).raise_for_status()

    limits = FleetLimits(start_timeout_s=config.servers.start_timeout_s, max_restarts=config.servers.max_restarts)
    return Fleet(config.servers.count, start, check, limits)
