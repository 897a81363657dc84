"""The processes of a job's nodes: which process on which node, with which GPUs and variables.

The agents are this test's requests.
"""

import asyncio
from pathlib import Path

import pytest

from megatron_rl.config import RunFolder, load_config
from megatron_rl.launch.cluster import ClusterMachines
from megatron_rl.processes import ProcessError
from megatron_rl.records import ModelContract, write_model_contract
from megatron_rl.wire.nodes import NodeRequest, StartOrder

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


async def join(machines: ClusterMachines) -> None:
    for role in ("trainer", "rollouts"):
        for index in range(2):
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


def test_a_trainer_without_one_of_its_nodes_does_not_start(machines):
    async def scene():
        await orders(machines, "trainer", 0)
        machines.start_trainer(ENVIRONMENT, resume=True)

    with pytest.raises(ProcessError, match="trainer node 1 is not there"):
        asyncio.run(scene())
