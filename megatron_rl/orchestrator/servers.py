"""The fleet's servers as processes: how one starts and ends, and what a health check is."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import httpx

from megatron_rl.config import Config, RunFolder
from megatron_rl.inference.registry import engine_of
from megatron_rl.orchestrator.commands import server_process
from megatron_rl.orchestrator.devices import ServerDevices
from megatron_rl.orchestrator.fleet import Fleet, FleetLimits
from megatron_rl.processes import Child, DevicePlan, Process, check_port, free_ports
from megatron_rl.records import read_model_contract

GRACE_S = 5.0


class ServerProcess:
    """An inference server, on this machine or on others.

    Args:
        parts: Its processes, the head first; one on each node that it spans.
        url: Where the head listens.
    """

    def __init__(self, parts: Sequence[Process], url: str) -> None:
        self.parts, self.url = tuple(parts), url

    def why_ended(self) -> str | None:
        """None while all parts run. The head of a server that spans nodes answers health checks also when a part is gone."""
        for part in self.parts:
            if (status := part.poll()) is not None:
                which = "" if part is self.parts[0] else f"its part {part.name} "
                return f"{which}ended with exit code {status}"
        return None

    async def stop(self) -> None:
        """Ask all parts to end, kill those that still run after GRACE_S, and return when none does."""
        for part in self.parts:
            part.terminate()
        await self._wait()
        for part in self.parts:
            part.kill()
        await self._wait()  # another machine takes its time to do so

    async def _wait(self) -> None:
        deadline = asyncio.get_running_loop().time() + GRACE_S
        while any(part.poll() is None for part in self.parts) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)


def fleet_of(config: Config, start: Callable[[int, int], Awaitable[ServerProcess]]) -> Fleet:
    """A fleet of config.servers.count servers. start: takes the slot and how often it was started before."""
    engine = engine_of(config)
    num_starts: Counter[int] = Counter()
    http = httpx.AsyncClient(timeout=None, trust_env=False)  # the fleet cuts a check off by itself

    async def start_next(slot: int) -> ServerProcess:
        restarts = num_starts[slot]
        num_starts[slot] += 1
        return await start(slot, restarts)

    async def check(url: str) -> None:
        await engine.check_health(http, url)

    limits = FleetLimits(start_timeout_s=config.servers.start_timeout_s, max_restarts=config.servers.max_restarts)
    return Fleet(config.servers.count, start_next, check, limits)


def local_fleet(config: Config, folder: RunFolder, plan: DevicePlan, key: str) -> Fleet:
    """Servers on this machine, each again on its GPUs, and on the same port when one was asked for."""
    devices = ServerDevices(config, plan)
    host, first = config.servers.host, config.servers.first_port

    async def start(slot: int, restarts: int) -> ServerProcess:
        if first:
            check_port(host, first + slot, f"servers.first_port, server {slot}")
        port = first + slot if first else free_ports(1, host)[0]
        plan, has_moe_layers = devices.plan_with(slot), bool(read_model_contract(folder.model_contract).moe_layers)
        command = server_process(config, folder, plan, slot, host, port, restarts, key, has_moe_layers=has_moe_layers)
        return ServerProcess([Child(command)], f"http://{host}:{port}")

    return fleet_of(config, start)
