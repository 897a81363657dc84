"""The processes of a job's nodes: which process on which node, with which GPUs and variables.

The agents are this test's requests.
"""

import asyncio
from pathlib import Path

import pytest

from megatron_rl.config import RunFolder, load_config
from megatron_rl.inference.vllm.engine import VllmEngine
from megatron_rl.launch.cluster import ClusterMachines
from megatron_rl.processes import ProcessError
from megatron_rl.records import ModelContract, write_model_contract
from megatron_rl.wire.nodes import NodeRequest, ProcessEnded, StartOrder

CONFIG = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"
ENVIRONMENT = {"MEGATRON_RL_ORCHESTRATOR": "http://10.0.0.1:4000", "MEGATRON_RL_KEY": "k"}
GPUS = [
    "--run.device",
    "cuda",
    "--layout.world_size",
    "16",
    "--layout.tensor",
    "2",
    "--servers.count",
    "3",
    "--servers.tensor",
    "2",
    "--slurm.trainer.nodes",
    "2",
    "--slurm.rollouts.nodes",
    "2",
    "--slurm.trainer.gpus_per_node",
    "8",
    "--slurm.rollouts.gpus_per_node",
    "4",
    "--slurm.interface",
    "lo",
    "--slurm.trainer.environment",
    '{NCCL_IB_HCA = "mlx5", CUDA_DEVICE_MAX_CONNECTIONS = "8"}',
]


@pytest.fixture
def machines(tmp_path, monkeypatch) -> ClusterMachines:
    monkeypatch.setenv("MEGATRON_RL_KEY", "k")
    write_model_contract(RunFolder(tmp_path).model_contract, ModelContract(64, (1,), 8, 2))
    return ClusterMachines(load_config(CONFIG, GPUS), RunFolder(tmp_path), "7.0")


def request(role: str, index: int) -> NodeRequest:
    address = f"10.0.{0 if role == 'trainer' else 1}.{index}"
    devices = tuple(str(4 + n) for n in range(8 if role == "trainer" else 4))  # as on a node that is shared with another job
    return NodeRequest(role, index, f"{role}-{index}", address, devices, (5000, 5001, 5002), 0, wait_s=0.0)


async def join(machines: ClusterMachines, num_rollouts: int = 2) -> None:
    for role, count in (("trainer", 2), ("rollouts", num_rollouts)):
        for index in range(count):
            await orders(machines, role, index)


async def orders(machines: ClusterMachines, role: str, index: int) -> list[StartOrder]:
    _, handle = machines.handlers["/node"]
    return list((await handle(request(role, index))).orders)


def test_ranks_share_the_nodes_and_get_their_roles_variables(machines):
    async def scene():
        await join(machines)
        machines.start_trainer(ENVIRONMENT, resume=True)
        return [await orders(machines, "trainer", index) for index in range(2)]

    first, second = asyncio.run(scene())
    assert [o.name for o in first] == [f"trainer-{rank}" for rank in range(8)]
    assert [(o.env["RANK"], o.env["CUDA_VISIBLE_DEVICES"]) for o in second] == [(str(8 + n), str(4 + n)) for n in range(8)]
    for order in (*first, *second):
        assert "--resume" in order.argv and order.env.items() >= ENVIRONMENT.items()
        assert order.env["NCCL_SOCKET_IFNAME"] == order.env["GLOO_SOCKET_IFNAME"] == "lo"
        assert order.env["NCCL_IB_HCA"] == "mlx5" and order.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"  # the user's word wins


def test_servers_and_workers_are_assigned_to_the_rollout_nodes(machines):
    async def scene():
        await join(machines)
        machines.start_workers(ENVIRONMENT)
        running = asyncio.create_task(machines.fleet().run())
        await asyncio.sleep(0.1)
        started = [await orders(machines, "rollouts", index) for index in range(2)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return started

    first, second = asyncio.run(scene())
    assert [sorted(o.name for o in node) for node in (first, second)] == [
        ["server-0", "server-2", "worker-0"],
        ["server-1", "worker-1"],
    ]
    servers = {o.name: o for o in (*first, *second) if o.name.startswith("server")}
    assert [servers[f"server-{slot}"].env["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4,5", "4,5", "6,7"]
    for slot, address in enumerate(("10.0.1.0", "10.0.1.1", "10.0.1.0")):
        order = servers[f"server-{slot}"]
        assert order.argv[order.argv.index("--host") + 1] == address == order.env["VLLM_HOST_IP"]
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in order.env and "NCCL_IB_HCA" not in order.env
    assert len({o.argv[o.argv.index("--port") + 1] for o in first if o.name.startswith("server")}) == 2


def test_a_server_that_finds_no_gpus_is_refused(machines):
    async def scene():
        await join(machines)
        fleet = machines.fleet()
        running = asyncio.create_task(fleet.run())
        await asyncio.sleep(0.05)
        fleet.add()
        fleet.add()
        reasons = []
        while not reasons:
            event = await asyncio.wait_for(fleet.events.get(), 10.0)
            reasons += [event.reason] if event.slot == 4 else []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return reasons[0]

    assert "no GPUs are left for server 4: rollouts node 0 has 4 GPUs" in asyncio.run(scene())


SPANNING = [*GPUS, "--servers.count", "2", "--servers.tensor", "8", "--servers.nodes", "2", "--slurm.rollouts.nodes", "4"]


def test_a_server_that_spans_nodes_is_started_on_neighbours_and_again_as_a_whole(tmp_path, monkeypatch):
    """A part that ends takes the others with it: each is asked to end, and only then all start anew, where they meet anew."""

    async def healthy(*arguments) -> None: ...

    monkeypatch.setenv("MEGATRON_RL_KEY", "k")
    monkeypatch.setattr(VllmEngine, "check_health", healthy)
    write_model_contract(RunFolder(tmp_path).model_contract, ModelContract(64, (1,), 8, 2))
    machines = ClusterMachines(load_config(CONFIG, SPANNING), RunFolder(tmp_path), "7.0")
    _, ended = machines.handlers["/node/ended"]

    async def orders_until(number: int, index: int) -> list:
        async with asyncio.timeout(60):
            while len(found := await orders(machines, "rollouts", index)) < number:
                await asyncio.sleep(0.05)
        return found

    async def scene():
        await join(machines, num_rollouts=4)
        fleet = machines.fleet()
        running = asyncio.create_task(fleet.run())
        first = [(await orders_until(1, index))[0] for index in range(4)]
        await ended(ProcessEnded(first[3].process, -9))
        stops = [(await orders_until(2, index))[1] for index in (2, 3)]
        assert len(await orders(machines, "rollouts", 2)) == 2, "no part starts before the others have ended"
        await ended(ProcessEnded(first[2].process, -15))
        again = [(await orders_until(4, index))[3] for index in (2, 3)]
        others = [len(await orders(machines, "rollouts", index)) for index in (0, 1)]
        reason = next(event.reason for event in iter(fleet.events.get_nowait, None) if event.kind == "left")
        running.cancel()
        for order in (*first[:2], *again):
            await ended(ProcessEnded(order.process, -15))
        await asyncio.gather(running, return_exceptions=True)
        return first, stops, again, others, reason

    first, stops, again, others, reason = asyncio.run(scene())
    assert [order.name for order in first] == ["server-0", "server-0.1", "server-1", "server-1.1"]
    assert [order.env["CUDA_VISIBLE_DEVICES"] for order in first] == ["4,5,6,7"] * 4
    assert [order.env["VLLM_HOST_IP"] for order in first] == [f"10.0.1.{index}" for index in range(4)]
    assert [Path(order.log_file).name for order in first[2:]] == ["server-1.log", "server-1.1.log"]
    for head, other, address in ((*first[:2], "10.0.1.0"), (*first[2:], "10.0.1.2"), (*again, "10.0.1.2")):
        meeting, port = (head.argv[head.argv.index(word) + 1] for word in ("--master-port", "--port"))
        assert port != meeting == other.argv[other.argv.index("--master-port") + 1]
        assert all(order.argv[order.argv.index("--master-addr") + 1] == address for order in (head, other))
        assert "--headless" in other.argv and "--headless" not in head.argv
        assert head.argv[head.argv.index("--seed") + 1] == other.argv[other.argv.index("--seed") + 1], "ranks sample alike"
    assert [(stop.process, stop.kill) for stop in stops] == [(order.process, False) for order in first[2:]]
    assert reason == "its part server-1.1 ended with exit code -9"
    assert [order.name for order in again] == ["server-1", "server-1.1"] and others == [1, 1]


def test_a_trainer_without_one_of_its_nodes_does_not_start(machines):
    async def scene():
        await orders(machines, "trainer", 0)
        machines.start_trainer(ENVIRONMENT, resume=True)

    with pytest.raises(ProcessError, match="trainer node 1 is not there"):
        asyncio.run(scene())
