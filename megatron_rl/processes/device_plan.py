"""Which GPUs each process of a run sees: a pure function of the machines and of what the processes ask for.

    machines and demands ──plan_devices──▶ DevicePlan ──environment(process)──▶ CUDA_VISIBLE_DEVICES

A process sees its own GPUs and no others, so no two processes can share one by accident, and a process that asks for none (a
rollout worker, and every process of a run on CPUs) cannot touch one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.errors import UserError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class DevicePlanError(UserError, ValueError):
    """A machine has fewer GPUs than its processes ask for."""


@dataclass(frozen=True)
class Machine:
    """A machine, and the GPUs of it that the run may use."""

    name: str
    """For messages, such as "this machine" or "rollouts node 3"."""
    devices: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES may name there, such as ("0", "1"). Empty: no GPU."""


@dataclass(frozen=True)
class Demand:
    """What one process asks for."""

    process: str
    """Its name, as in logs/NAME.log; unique in a plan."""
    num_devices: int
    """GPUs of its own. 0: it must see none."""
    machine: int = 0
    """Index of its machine."""


@dataclass(frozen=True)
class Assignment:
    """One process with the GPUs that it sees."""

    process: str
    machine: str
    """Name of its machine."""
    devices: tuple[str, ...]


@dataclass(frozen=True)
class DevicePlan:
    """Who sees which GPUs. Made by `plan_devices`."""

    machines: tuple[Machine, ...]
    demands: tuple[Demand, ...]
    assignments: tuple[Assignment, ...]

    def __contains__(self, process: str) -> bool:
        return any(a.process == process for a in self.assignments)

    def devices_of(self, process: str) -> tuple[str, ...]:
        """The GPUs of a process. Raises KeyError for one that is not in the plan."""
        for assignment in self.assignments:
            if assignment.process == process:
                return assignment.devices
        raise KeyError(process)

    def environment(self, process: str) -> dict[str, str]:
        """The variables by which a process sees its GPUs alone; numbers count as nvidia-smi counts them."""
        devices = self.devices_of(process)
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if devices else {}
        return {**order, VISIBLE_DEVICES: ",".join(devices)}

    def extended(self, *demands: Demand) -> "DevicePlan":
        """The plan with further processes, which get GPUs that no other one has.

        Raises:
            DevicePlanError: None are left on its machine.
        """
        return plan_devices(self.machines, (*self.demands, *demands))

    def lines(self) -> list[str]:
        """One line a process, for a person."""
        return [f"{a.process}: {a.machine}, {_described(a.devices)}" for a in self.assignments]


def plan_devices(machines: Sequence[Machine], demands: Sequence[Demand]) -> DevicePlan:
    """Give each process the next free GPUs of its machine, in the order of the demands.

    Args:
        machines: All machines of the run.
        demands: Of all processes; those that come first get the first GPUs of their machine.

    Raises:
        DevicePlanError: Names each machine that has too few, with the numbers and what to change.
    """
    asked = [[d for d in demands if d.machine == index] for index in range(len(machines))]
    short = [
        _shortage(machine, own)
        for machine, own in zip(machines, asked, strict=True)
        if sum(d.num_devices for d in own) > len(machine.devices)
    ]
    if short:
        raise DevicePlanError("\n".join(short))
    used = [0] * len(machines)
    assignments = []
    for demand in demands:
        first, machine = used[demand.machine], machines[demand.machine]
        used[demand.machine] += demand.num_devices
        assignments.append(Assignment(demand.process, machine.name, machine.devices[first : first + demand.num_devices]))
    return DevicePlan(tuple(machines), tuple(demands), tuple(assignments))


def _shortage(machine: Machine, demands: Sequence[Demand]) -> str:
    """For example: this machine has 4 GPUs, and 6 are needed there: 2 by 2 trainer, 4 by 2 server; ..."""
    kinds: dict[str, list[int]] = {}
    for demand in demands:
        if demand.num_devices:
            kinds.setdefault(demand.process.rpartition("-")[0] or demand.process, []).append(demand.num_devices)
    parts = [
        f"{len(sizes)} {kind} process{'es' if len(sizes) > 1 else ''} of {_span(sizes)} GPU{'s' if max(sizes) > 1 else ''}"
        for kind, sizes in kinds.items()
    ]
    needed = sum(d.num_devices for d in demands)
    return (
        f"{machine.name} has {len(machine.devices)} GPUs for this run, and {needed} are needed there: {', '.join(parts)}; lower "
        "layout.world_size, servers.count or servers.tensor, or use more machines or machines with more GPUs"
    )


def _span(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"


def _described(devices: Sequence[str]) -> str:
    return f"GPU {','.join(devices)}" if devices else "no GPU"
