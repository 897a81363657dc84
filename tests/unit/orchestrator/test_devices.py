"""Which GPUs the processes of a configuration get: on one machine, on nodes, and for every configuration that is shipped."""

from pathlib import Path

import pytest

from megatron_rl.config import Config, load_config
from megatron_rl.inference.errors import UnsupportedByEngineError
from megatron_rl.inference.vllm.server import devices_per_server
from megatron_rl.orchestrator import ServerDevices, cluster_plan, devices_for, gpus_of_run, local_plan, ranks_plan
from megatron_rl.processes import DevicePlanError, ProcessError
from tests.unit.processes.test_device_plan import assert_disjoint

SHIPPED = sorted((Path(__file__).parents[3] / "model_configs").glob("*.toml"))
ON_ONE_NODE = [path for path in SHIPPED if load_config(path, []).servers.nodes == 1]
TINY = Path(__file__).parents[3] / "model_configs" / "tiny-moe-cpu.toml"


def config_of(*words: str) -> Config:
    return load_config(TINY, words)


def gpu_run(ranks: int, count: int, width: int, *words: str) -> Config:
    sizes = (
        "--layout.world_size",
        str(ranks),
        "--layout.expert",
        "1",
        "--servers.count",
        str(count),
        "--servers.tensor",
        str(width),
    )
    return config_of("--run.device", "cuda", *sizes, *words)


def numbered(count: int) -> list[str]:
    return [str(n) for n in range(count)]


@pytest.mark.parametrize(("ranks", "count", "width"), [(1, 1, 1), (2, 3, 2), (4, 1, 4), (3, 2, 1)])
def test_one_machine(ranks, count, width):
    config = gpu_run(ranks, count, width)
    needed = ranks + count * width
    assert gpus_of_run(config) == needed
    plan = local_plan(config, numbered(needed))
    assert_disjoint(plan)
    assert [plan.devices_of(f"trainer-{rank}") for rank in range(ranks)] == [(str(rank),) for rank in range(ranks)]
    assert all(len(plan.devices_of(f"server-{slot}")) == width for slot in range(count))
    assert plan.devices_of("worker-0") == ()
    with pytest.raises(DevicePlanError, match=f"this machine has {needed - 1} GPUs for this run, and {needed} are needed"):
        local_plan(config, numbered(needed - 1))


@pytest.mark.parametrize(("nodes", "count", "width"), [(1, 2, 4), (2, 3, 2), (3, 7, 1), (4, 4, 8)])
def test_a_cluster(nodes, count, width):
    config = gpu_run(8 * nodes, count, width)
    plan = cluster_plan(config, [numbered(8)] * nodes, [numbered(8)] * nodes)
    assert_disjoint(plan)
    assert plan.devices_of(f"trainer-{8 * nodes - 1}") == ("7",)
    for slot in range(count):
        (found,) = (a for a in plan.assignments if a.process == f"server-{slot}")
        assert found.machine == f"rollouts node {slot % nodes}" and len(found.devices) == width


@pytest.mark.parametrize(("num_nodes", "span", "count"), [(2, 2, 1), (4, 2, 2), (4, 2, 4), (6, 3, 3)])
def test_a_server_that_spans_nodes_has_an_equal_part_of_its_gpus_on_each(num_nodes, span, count):
    config = gpu_run(8, count, 4 * span, "--servers.nodes", str(span))
    plan = cluster_plan(config, [numbered(8)], [numbered(8)] * num_nodes)
    assert_disjoint(plan)
    for slot in range(count):
        parts = [a for a in plan.assignments if a.process.partition(".")[0] == f"server-{slot}"]
        assert [a.process for a in parts] == [f"server-{slot}", *(f"server-{slot}.{part}" for part in range(1, span))]
        first = int(parts[0].machine.rpartition(" ")[2])
        assert first % span == 0, "servers share all of their nodes, or none"
        assert [a.machine for a in parts] == [f"rollouts node {first + part}" for part in range(span)]
        assert all(len(a.devices) == 4 for a in parts)
    used = {a.machine for a in plan.assignments if a.process.startswith("server")}
    assert len(used) == min(num_nodes, count * span)


def test_a_server_that_spans_nodes_does_not_start_on_one_machine():
    config = gpu_run(1, 1, 4, "--servers.nodes", "2")
    with pytest.raises(DevicePlanError, match="servers.nodes = 2: one machine is one node.* by `megatron-rl launch`"):
        local_plan(config, numbered(8))


def test_all_parts_of_a_server_that_is_added_get_gpus_or_none_does():
    config = gpu_run(1, 1, 4, "--servers.nodes", "2")
    plan = cluster_plan(config, [numbered(1)], [numbered(4), numbered(3)])
    devices = ServerDevices(config, plan, first_machine=1, num_machines=2)
    with pytest.raises(ProcessError, match="no GPUs are left for server 1: rollouts node 1 has 3 GPUs"):
        devices.plan_with(1)
    assert "server-1" not in devices.plan_with(0)


@pytest.mark.parametrize("path", ON_ONE_NODE, ids=lambda path: path.stem)
def test_every_shipped_configuration(path):
    """On one machine that has as many GPUs as it needs; tests/unit/launch has all of them on a cluster."""
    config = load_config(path, [])
    plan = local_plan(config, numbered(gpus_of_run(config)))
    assert_disjoint(plan)
    assert len(plan.assignments) == config.layout.world_size + config.servers.count + 1


def test_a_run_on_cpus_asks_no_driver_and_sees_no_gpu(monkeypatch):
    monkeypatch.setattr("megatron_rl.processes.gpus.query_gpus", lambda run: pytest.fail("the driver was asked"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = config_of("--run.device", "cpu")
    assert devices_for(config) == () and gpus_of_run(config) == 0
    plan = local_plan(config, devices_for(config))
    assert {plan.environment(a.process)["CUDA_VISIBLE_DEVICES"] for a in plan.assignments} == {""}


def test_a_replay_has_the_ranks_alone():
    plan = ranks_plan(gpu_run(2, 4, 8), "replay", numbered(2))
    assert [a.process for a in plan.assignments] == ["replay-0", "replay-1"]


def test_a_server_that_is_added_gets_free_gpus_or_says_that_there_are_none():
    config = gpu_run(1, 1, 2)
    devices = ServerDevices(config, local_plan(config, numbered(5)))
    assert devices.plan_with(0).devices_of("server-0") == ("1", "2")
    assert devices.plan_with(1).devices_of("server-1") == ("3", "4")
    assert devices.plan_with(1).devices_of("server-1") == ("3", "4")  # again, as after a restart
    with pytest.raises(ProcessError, match="no GPUs are left for server 2: this machine has 5 GPUs"):
        devices.plan_with(2)


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        ([], 2),
        (["--pipeline-parallel-size", "3"], 6),
        (["--data_parallel_size=4"], 8),
        (["-tp", "8", "-pp", "2"], 16),
        (["--max-num-batched-tokens", "4096"], 2),
    ],
)
def test_what_the_user_adds_to_a_server_counts(arguments, devices):
    assert devices_per_server(2, arguments) == devices
    assert gpus_of_run(gpu_run(1, 1, 2, "--servers.extra_arguments", str(arguments))) == 1 + devices


def test_a_size_that_is_none_is_named():
    with pytest.raises(UnsupportedByEngineError, match="--pipeline-parallel-size"):
        devices_per_server(1, ["--pipeline-parallel-size", "--enforce-eager"])
