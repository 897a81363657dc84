"""Processes, here and on the nodes of a cluster, and ports: started, watched and stopped so that none is left running."""

from megatron_rl.processes.addresses import AddressError, address_of_interface, address_of_this_host, interface_of
from megatron_rl.processes.child import (
    Child,
    Command,
    Process,
    ProcessError,
    end_forks_with_me,
    ignore_sigterm,
    kill_with_parent,
    log_tail,
    stop_all,
)
from megatron_rl.processes.device_plan import Assignment, Demand, DevicePlan, DevicePlanError, Machine, plan_devices
from megatron_rl.processes.gpus import Gpu, GpuQueryError, named_devices, query_gpus, usable_devices
from megatron_rl.processes.nodes import Nodes, RemoteProcess
from megatron_rl.processes.ports import PortError, check_host, check_port, free_ports

__all__ = [
    "AddressError",
    "Assignment",
    "Child",
    "Command",
    "Demand",
    "DevicePlan",
    "DevicePlanError",
    "Gpu",
    "GpuQueryError",
    "Machine",
    "Nodes",
    "PortError",
    "Process",
    "ProcessError",
    "RemoteProcess",
    "address_of_interface",
    "address_of_this_host",
    "check_host",
    "check_port",
    "end_forks_with_me",
    "free_ports",
    "ignore_sigterm",
    "interface_of",
    "kill_with_parent",
    "log_tail",
    "named_devices",
    "plan_devices",
    "query_gpus",
    "stop_all",
    "usable_devices",
]
