"""The asynchronous loop of a run; loads neither torch nor Megatron nor the inference engine."""

from megatron_rl.orchestrator.checkpoints import restore
from megatron_rl.orchestrator.commands import replay_processes, server_process, trainer_processes, worker_process
from megatron_rl.orchestrator.context import RunFailedError
from megatron_rl.orchestrator.devices import (
    ServerDevices,
    cluster_plan,
    devices_for,
    gpus_of_run,
    local_plan,
    nodes_of_server,
    ranks_plan,
)
from megatron_rl.orchestrator.http import control_app, listen, serving
from megatron_rl.orchestrator.observer import Observer
from megatron_rl.orchestrator.orchestrator import Orchestrator
from megatron_rl.orchestrator.requests import ServersRequest, ask
from megatron_rl.orchestrator.servers import ServerProcess, fleet_of, local_fleet
from megatron_rl.orchestrator.state import RunState

__all__ = [
    "Observer",
    "Orchestrator",
    "RunFailedError",
    "RunState",
    "ServerDevices",
    "ServerProcess",
    "ServersRequest",
    "ask",
    "cluster_plan",
    "control_app",
    "devices_for",
    "fleet_of",
    "gpus_of_run",
    "listen",
    "local_fleet",
    "local_plan",
    "nodes_of_server",
    "ranks_plan",
    "replay_processes",
    "restore",
    "server_process",
    "serving",
    "trainer_processes",
    "worker_process",
]
