"""The agent of one node of a Slurm job: `python -m megatron_rl.processes.agent RUN_DIR --role trainer|rollouts`, one task a node.

It finds the orchestrator by RUN/orchestrator.json (which each attempt of the job writes anew), joins it, and starts and ends
processes as ordered. All of them end with it: when Slurm ends its job step, and when the orchestrator has not answered for
PATIENCE_S. In its environment are the run's key (MEGATRON_RL_KEY), the job's attempt (MEGATRON_RL_ATTEMPT) and the number of
the node (SLURM_PROCID).
"""

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from megatron_rl.config import RunFolder
from megatron_rl.errors import RunError, UserError
from megatron_rl.processes.addresses import AddressError, address_of_interface, interface_of
from megatron_rl.processes.child import Child, Command, ProcessError, stop_all
from megatron_rl.processes.ports import free_ports
from megatron_rl.wire.access import key_from_environment
from megatron_rl.wire.client import AsyncControlClient
from megatron_rl.wire.control import Ack, decode
from megatron_rl.wire.nodes import (
    ADDRESS_VARIABLE,
    ROLES,
    NodeOrders,
    NodeRequest,
    OrchestratorPlace,
    ProcessEnded,
    StartOrder,
    StopOrder,
    job_attempt,
    variable_of_the_job,
)
from megatron_rl.wire.stores import address_towards

PATIENCE_S = 60.0
GRACE_S = 10.0
NUM_PORTS = 32
WATCH_EVERY_S = 0.2
NOT_STARTED = 127
"""Exit status of a process whose program cannot be started, as in a shell."""

logger = logging.getLogger(__name__)


class Agent:
    """Starts and ends processes on its node as ordered.

    Args:
        role: Of the node: trainer or rollouts.
        index: Of the node among those of its role.
        place: Host and URL of the orchestrator.
        key: The run's key.
        address: Under which the other nodes reach this one.
        devices: Values for CUDA_VISIBLE_DEVICES on this node.
    """

    def __init__(self, role: str, index: int, place: OrchestratorPlace, key: str, address: str, devices: tuple[str, ...]) -> None:
        self._role, self._index, self._address, self._devices = role, index, address, devices
        self._orchestrator = AsyncControlClient(place.url, key, patience_s=PATIENCE_S)
        self._children: dict[str, Child] = {}
        self._num_done = 0

    async def run(self) -> None:
        """Carry out orders until the run has ended.

        Raises:
            OrchestratorGoneError: The orchestrator no longer answers.
        """
        tasks = [asyncio.create_task(self._obey()), asyncio.create_task(self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            stop_all(list(self._children.values()), GRACE_S)

    async def _obey(self) -> None:
        while True:
            answer = await self._ask()
            for order in answer.orders:
                await self._carry_out(order)
                self._num_done += 1
            if answer.leave:
                return

    async def _ask(self) -> NodeOrders:
        ports = tuple(free_ports(NUM_PORTS, self._address))
        request = NodeRequest(self._role, self._index, socket.gethostname(), self._address, self._devices, ports, self._num_done)
        return await self._orchestrator.send("/node", request, NodeOrders)

    async def _carry_out(self, order: StartOrder | StopOrder) -> None:
        if isinstance(order, StartOrder):
            await self._start(order)
        elif (child := self._children.get(order.process)) is not None:
            child.kill() if order.kill else child.terminate()

    async def _start(self, order: StartOrder) -> None:
        environment = {**gloo_interface(self._address), **order.env, ADDRESS_VARIABLE: self._address}
        try:
            self._children[order.process] = Child(
                Command(order.name, order.argv, Path(order.log_file), environment, order.stop_signal)
            )
        except ProcessError as error:
            logger.error("%s", error)
            Path(order.log_file).write_text(f"{error}\n")
            await self._orchestrator.send("/node/ended", ProcessEnded(order.process, NOT_STARTED), Ack)

    async def _watch(self) -> None:
        reported: set[str] = set()
        while True:
            for process, child in list(self._children.items()):
                if process not in reported and (status := child.poll()) is not None:
                    await self._orchestrator.send("/node/ended", ProcessEnded(process, status), Ack)
                    reported.add(process)
            await asyncio.sleep(WATCH_EVERY_S)


async def place_of(folder: RunFolder, attempt: str) -> OrchestratorPlace:
    """Wait until this attempt's orchestrator has written its place, and return it. Slurm ends the job if it never does."""
    while True:
        with contextlib.suppress(
            FileNotFoundError, ValueError
        ):  # from an earlier attempt, maybe of another version of the program
            place = decode(folder.orchestrator_file.read_bytes(), OrchestratorPlace)
            if place.attempt == attempt:
                return place
        await asyncio.sleep(0.5)


def own_address(place: OrchestratorPlace, interface: str | None) -> str:
    """The address under which the other nodes reach this one.

    Args:
        place: Host and URL of the orchestrator.
        interface: The network interface to use; None: the one on the way to the orchestrator.

    Raises:
        AddressError: The interface has no address, or the orchestrator's own address is a loopback address of another machine.
    """
    host, _, port = place.url.removeprefix("http://").partition(":")
    if ipaddress.ip_address(host).is_loopback and socket.gethostname() != place.host:
        raise AddressError(
            f"the host name {place.host} has the address {host} there, which no other node can reach; set slurm.interface"
        )
    return address_of_interface(interface) if interface else address_towards(host, int(port))


def gloo_interface(address: str) -> dict[str, str]:
    """The variable by which Gloo listens at this node's address. Without it, it takes the host name's, maybe a loopback one."""
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", interface)} if interface else {}


def devices_here(gpus: int) -> tuple[str, ...]:
    """The GPUs that Slurm assigned to this job step, else the first `gpus`."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(given.split(",")[:gpus]) if given else tuple(map(str, range(gpus)))


async def serve(folder: RunFolder, role: str) -> None:
    """Find the orchestrator of this attempt, join it, and carry out orders until the run has ended.

    Raises:
        AddressError: This node has no address for the others.
        OrchestratorGoneError: The orchestrator no longer answers.
    """
    place = await place_of(folder, job_attempt())
    slurm = folder.config().slurm
    address = own_address(place, slurm.interface)
    devices = devices_here((slurm.trainer if role == "trainer" else slurm.rollouts).gpus_per_node)
    await Agent(role, int(variable_of_the_job("SLURM_PROCID")), place, key_from_environment(), address, devices).run()


def main() -> int:
    """The program: exit status 1 when the orchestrator no longer answers, or the node cannot join."""
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.processes.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--role", choices=ROLES, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request otherwise
    # Slurm sends it to every task of a job that is cancelled or preempted: the orchestrator saves then, and needs its processes
    # for that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        asyncio.run(serve(RunFolder(arguments.run_dir), arguments.role))
    except (UserError, RunError) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
