"""The nodes of a Slurm job as the machines of a run.

The batch script starts an agent on each, which starts and ends processes.
"""

import dataclasses
import functools
import socket
from collections.abc import Callable, Mapping

from megatron_rl.config import Config, RunFolder
from megatron_rl.inference.engine import ServerPart
from megatron_rl.inference.registry import engine_of
from megatron_rl.launch.machines import GRACE_S
from megatron_rl.orchestrator import (
    ServerDevices,
    ServerProcess,
    cluster_plan,
    fleet_of,
    nodes_of_server,
    server_process,
    trainer_processes,
    worker_process,
)
from megatron_rl.orchestrator.fleet import Fleet
from megatron_rl.processes import Command, DevicePlan, Nodes, Process, RemoteProcess, address_of_interface, address_of_this_host
from megatron_rl.records import read_model_contract, write_atomically
from megatron_rl.wire.access import key_from_environment
from megatron_rl.wire.control import encode
from megatron_rl.wire.nodes import OrchestratorPlace


class ClusterMachines:
    """The nodes of a job; the orchestrator is on the first trainer node.

    Args:
        config: Of the run.
        folder: Of the run.
        attempt: Of the job, so that agents of an earlier attempt do not join this one.

    Raises:
        AddressError: This node has no address for the others.
    """

    def __init__(self, config: Config, folder: RunFolder, attempt: str) -> None:
        self._config, self._folder, self._attempt = config, folder, attempt
        slurm = config.slurm
        self.address = address_of_interface(slurm.interface) if slurm.interface else address_of_this_host()
        self.key = key_from_environment()
        self._ranks: list[RemoteProcess] = []
        self._num_nodes = {"trainer": slurm.trainer.nodes, "rollouts": slurm.rollouts.nodes}
        self._nodes = Nodes(self._num_nodes)

    @property
    def handlers(self) -> Mapping[str, tuple[type, Callable]]:
        """Of the nodes' agents."""
        return self._nodes.handlers

    async def gather(self, url: str) -> None:
        """Write RUN/orchestrator.json, by which the agents find the orchestrator, and wait until all nodes have joined.

        Raises:
            ProcessError: A node has not joined within slurm.join_timeout_s.
        """
        write_atomically(self._folder.orchestrator_file, encode(OrchestratorPlace(self._attempt, socket.gethostname(), url)))
        await self._nodes.wait_until_joined(self._config.slurm.join_timeout_s)

    def fleet(self) -> Fleet:
        """Servers, assigned in turn to the rollout nodes, or to groups of them where a server spans several."""
        return fleet_of(self._config, self._start_server)

    def start_workers(self, environment: Mapping[str, str]) -> list[Process]:
        """Start one worker on each rollout node."""
        environment = {**environment, **self._of_role("rollouts")}
        commands = [
            worker_process(self._folder, self._plan, environment, number) for number in range(self._config.slurm.rollouts.nodes)
        ]
        return [self._nodes.start(self._nodes.node("rollouts", number), command) for number, command in enumerate(commands)]

    def start_trainer(self, environment: Mapping[str, str], resume: bool) -> list[Process]:
        """Start layout.world_size ranks, the same number on each trainer node."""
        per_node = ranks_per_node(self._config)
        environment = {**environment, **self._of_role("trainer")}
        commands = trainer_processes(self._config, self._folder, self._plan, environment, resume)
        nodes = [self._nodes.node("trainer", rank // per_node) for rank in range(len(commands))]
        self._ranks = [self._nodes.start(node, command) for node, command in zip(nodes, commands, strict=True)]
        return list(self._ranks)

    async def stop_trainer(self) -> None:
        """End all ranks that still run."""
        await self._nodes.stop(self._ranks, GRACE_S)

    async def stop(self) -> None:
        """End all processes, and tell the agents to exit."""
        await self._nodes.end(GRACE_S)

    async def _start_server(self, slot: int, restarts: int) -> ServerProcess:
        """Start all parts of a server on the nodes of its slot, with the GPUs that the plan gives them."""
        count = self._config.servers.nodes
        indices = nodes_of_server(self._config, slot, self._num_nodes["rollouts"])
        nodes = [self._nodes.node("rollouts", index) for index in indices]
        plan, head = self._server_devices.plan_with(slot), nodes[0]
        port, head_port = head.take_port(), head.take_port() if count > 1 else 0
        has_moe_layers = bool(read_model_contract(self._folder.model_contract).moe_layers)
        parts = []
        for index, node in enumerate(nodes):
            part = ServerPart(index, count, head.address, head_port) if count > 1 else None
            command = server_process(
                self._config,
                self._folder,
                plan,
                slot,
                node.address,
                port,
                restarts,
                self.key,
                has_moe_layers=has_moe_layers,
                part=part,
            )
            environment = {
                **command.env,
                **engine_of(self._config).cluster_environment(node.address),
                **self._of_role("rollouts"),
                **plan.environment(command.name),  # last: no variable of the user's may let two processes share a GPU
            }
            parts.append(self._nodes.start(node, _with_environment(command, environment)))
        return ServerProcess(parts, f"http://{head.address}:{port}")

    @functools.cached_property
    def _plan(self) -> DevicePlan:
        """Of the GPUs that the nodes' agents have reported; all nodes have to be there when it is first asked for."""
        devices = {
            role: [self._nodes.node(role, index).devices for index in range(count)] for role, count in self._num_nodes.items()
        }
        return cluster_plan(self._config, devices["trainer"], devices["rollouts"])

    @functools.cached_property
    def _server_devices(self) -> ServerDevices:
        return ServerDevices(self._config, self._plan, self._num_nodes["trainer"], self._num_nodes["rollouts"])

    def _of_role(self, role: str) -> dict[str, str]:
        """The network interface for NCCL and Gloo, and what the configuration adds."""
        slurm = self._config.slurm
        interface = {"NCCL_SOCKET_IFNAME": slurm.interface, "GLOO_SOCKET_IFNAME": slurm.interface} if slurm.interface else {}
        return {**interface, **(slurm.trainer if role == "trainer" else slurm.rollouts).environment}


def ranks_per_node(config: Config) -> int:
    """Trainer ranks on each trainer node."""
    return config.layout.world_size // config.slurm.trainer.nodes


def _with_environment(command: Command, environment: Mapping[str, str]) -> Command:
    return dataclasses.replace(command, env=environment)
