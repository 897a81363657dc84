"""The device plan of a run: what each process of a configuration asks for. `run.device` alone decides whether that is a GPU.

On one machine the trainer's ranks get the first GPUs and the servers those that follow. On a cluster each role has its own nodes.
A rank has one GPU. A server has as many as its engine spreads it over, in equal parts on each of its nodes. A worker has none.
"""

from collections.abc import Sequence

from megatron_rl.config import Config
from megatron_rl.inference.registry import engine_of
from megatron_rl.processes import Demand, DevicePlan, DevicePlanError, Machine, ProcessError, plan_devices, usable_devices


def local_plan(config: Config, devices: Sequence[str], machine: str = "this machine") -> DevicePlan:
    """All processes of a run on one machine.

    Args:
        config: Of the run.
        devices: What CUDA_VISIBLE_DEVICES may name there.
        machine: Its name, for messages.

    Raises:
        DevicePlanError: The machine has too few GPUs, or a server would span several machines.
    """
    if config.servers.nodes > 1:
        raise DevicePlanError(
            f"servers.nodes = {config.servers.nodes}: one machine is one node, and such a server spans several; submit the run "
            "by `megatron-rl launch`, or set servers.nodes = 1"
        )
    servers = [demand for slot in range(config.servers.count) for demand in server_demands(config, slot)]
    return plan_devices([Machine(machine, tuple(devices))], [*rank_demands(config, "trainer"), *servers, Demand("worker-0", 0)])


def ranks_plan(config: Config, name: str, devices: Sequence[str]) -> DevicePlan:
    """The trainer's ranks alone, on one machine: of a replay, of an attribution.

    Args:
        config: Of the run.
        name: Of the processes, in front of the rank: NAME-0, NAME-1.
        devices: What CUDA_VISIBLE_DEVICES may name there.

    Raises:
        DevicePlanError: The machine has too few GPUs.
    """
    return plan_devices([Machine("this machine", tuple(devices))], rank_demands(config, name))


def cluster_plan(
    config: Config, trainer_devices: Sequence[Sequence[str]], rollout_devices: Sequence[Sequence[str]]
) -> DevicePlan:
    """All processes of a run on the nodes of a cluster, with the same number of ranks on each trainer node.

    Args:
        config: Of the run.
        trainer_devices: What CUDA_VISIBLE_DEVICES may name on each trainer node.
        rollout_devices: The same for each rollout node.

    Raises:
        DevicePlanError: A node has too few GPUs.
    """
    num_trainer, num_rollouts = len(trainer_devices), len(rollout_devices)
    machines = [Machine(f"trainer node {index}", tuple(devices)) for index, devices in enumerate(trainer_devices)]
    machines += [Machine(f"rollouts node {index}", tuple(devices)) for index, devices in enumerate(rollout_devices)]
    demands = rank_demands(config, "trainer", num_trainer)
    for slot in range(config.servers.count):
        demands += server_demands(config, slot, num_trainer, num_rollouts)
    demands += [Demand(f"worker-{index}", 0, num_trainer + index) for index in range(num_rollouts)]
    return plan_devices(machines, demands)


def rank_demands(config: Config, name: str, num_nodes: int = 1) -> list[Demand]:
    """One demand for each rank of the layout, in blocks over the nodes."""
    world, gpus = config.layout.world_size, 0 if config.device == "cpu" else 1
    per_node = -(-world // num_nodes)
    return [Demand(f"{name}-{rank}", gpus, rank // per_node) for rank in range(world)]


def server_demands(config: Config, slot: int, first_machine: int = 0, num_machines: int = 1) -> list[Demand]:
    """One demand for each part of a server."""
    gpus = gpus_per_server(config) // config.servers.nodes
    nodes = nodes_of_server(config, slot, num_machines)
    return [Demand(server_name(slot, part), gpus, first_machine + node) for part, node in enumerate(nodes)]


def nodes_of_server(config: Config, slot: int, num_nodes: int) -> range:
    """The rollout nodes that a server is on, the head's first: slots go in turn over groups of neighbouring nodes."""
    width = config.servers.nodes
    first = slot % max(1, num_nodes // width) * width
    return range(first, first + width)


def server_name(slot: int, part: int = 0) -> str:
    """The name of a server's process; of one that spans nodes, `server-0` is the head, `server-0.1` its part on the next node."""
    return f"server-{slot}.{part}" if part else f"server-{slot}"


def gpus_per_server(config: Config) -> int:
    """GPUs of one server, over all of its nodes; 0 on CPUs.

    Raises:
        UnsupportedByEngineError: The engine has no server of this shape.
    """
    s = config.servers
    devices = engine_of(config).devices_per_server(s.tensor, s.extra_arguments, s.nodes)
    return 0 if config.device == "cpu" else devices


def devices_for(config: Config) -> tuple[str, ...]:
    """The GPUs of this machine that a run may use; none, and the driver is not asked, where it computes on CPUs.

    Raises:
        GpuQueryError: They cannot be found out.
    """
    return () if config.device == "cpu" else usable_devices()


def gpus_of_run(config: Config) -> int:
    """GPUs of all processes together."""
    return sum(d.num_devices for d in rank_demands(config, "trainer")) + config.servers.count * gpus_per_server(config)


class ServerDevices:
    """The device plan of a run whose fleet may grow while it continues.

    A slot keeps its GPUs, also when its server is removed and another one is added in its place.

    Args:
        config: Of the run.
        plan: Of the processes that it starts with.
        first_machine: Index of the first machine that has servers.
        num_machines: How many have.
    """

    def __init__(self, config: Config, plan: DevicePlan, first_machine: int = 0, num_machines: int = 1) -> None:
        self._config, self._plan = config, plan
        self._first_machine, self._num_machines = first_machine, num_machines

    def plan_with(self, slot: int) -> DevicePlan:
        """The plan, with the server of this slot in it.

        Raises:
            ProcessError: No GPUs are left for it.
        """
        if server_name(slot) not in self._plan:
            demands = server_demands(self._config, slot, self._first_machine, self._num_machines)
            try:
                self._plan = self._plan.extended(*demands)
            except DevicePlanError as error:
                raise ProcessError(f"no GPUs are left for server {slot}: {error}") from None
        return self._plan
