"""No two processes of a plan share a GPU, and too few GPUs are refused with the numbers.

Not proved here: that CUDA honours CUDA_VISIBLE_DEVICES.
"""

import itertools
import random

import pytest

from megatron_rl.processes import Demand, DevicePlan, DevicePlanError, Machine, plan_devices


def machines_of(sizes: list[int]) -> list[Machine]:
    return [Machine(f"node {index}", tuple(str(10 * index + n) for n in range(size))) for index, size in enumerate(sizes)]


def assert_disjoint(plan: DevicePlan) -> None:
    seen: dict[tuple[str, str], str] = {}
    for assignment in plan.assignments:
        for device in assignment.devices:
            other = seen.setdefault((assignment.machine, device), assignment.process)
            assert other == assignment.process, f"{other} and {assignment.process} share GPU {device} of {assignment.machine}"
        assert len(set(assignment.devices)) == len(assignment.devices)


def test_no_two_processes_share_a_gpu_and_each_gets_what_it_asked_for():
    """Over many machines and demands that fit, drawn at random."""
    draw = random.Random(7)
    for _ in range(500):
        machines = machines_of([draw.randint(0, 9) for _ in range(draw.randint(1, 4))])
        free, demands = [len(m.devices) for m in machines], []
        for number in range(draw.randint(1, 12)):
            machine = draw.randrange(len(machines))
            demands.append(Demand(f"p-{number}", draw.randint(0, free[machine]), machine))
            free[machine] -= demands[-1].num_devices
        plan = plan_devices(machines, demands)
        assert_disjoint(plan)
        for demand in demands:
            devices = plan.devices_of(demand.process)
            assert len(devices) == demand.num_devices and set(devices) <= set(machines[demand.machine].devices)


@pytest.mark.parametrize(("ranks", "count", "width"), list(itertools.product((1, 2, 8), (1, 3), (1, 2, 4))))
def test_what_does_not_fit_is_refused_and_what_fits_is_not(ranks, count, width):
    demands = [Demand(f"trainer-{n}", 1) for n in range(ranks)] + [Demand(f"server-{n}", width) for n in range(count)]
    needed = ranks + count * width
    assert_disjoint(plan_devices(machines_of([needed]), demands))
    with pytest.raises(DevicePlanError, match=f"node 0 has {needed - 1} GPUs for this run, and {needed} are needed there"):
        plan_devices(machines_of([needed - 1]), demands)


def test_each_machine_that_is_too_small_is_named_with_who_asks_and_the_remedy():
    demands = [Demand("trainer-0", 1), Demand("trainer-1", 1), Demand("server-0", 4, 1), Demand("server-1", 2, 1)]
    with pytest.raises(DevicePlanError) as raised:
        plan_devices(machines_of([1, 5]), [*demands, Demand("worker-0", 0, 1)])
    first, second = str(raised.value).splitlines()
    assert "node 0 has 1 GPUs for this run, and 2 are needed there: 2 trainer processes of 1 GPU;" in first
    assert "node 1 has 5 GPUs for this run, and 6 are needed there: 2 server processes of 2 to 4 GPUs;" in second
    assert "lower layout.world_size, servers.count or servers.tensor" in first


def test_a_process_without_a_gpu_sees_none():
    plan = plan_devices(machines_of([2]), [Demand("server-0", 2), Demand("worker-0", 0)])
    assert plan.environment("server-0") == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert plan.environment("worker-0") == {"CUDA_VISIBLE_DEVICES": ""}
    assert plan.lines() == ["server-0: node 0, GPU 0,1", "worker-0: node 0, no GPU"]


def test_one_more_process_gets_gpus_that_no_other_has():
    plan = plan_devices(machines_of([3]), [Demand("server-0", 1)])
    more = plan.extended(Demand("server-1", 2))
    assert more.devices_of("server-0") == ("0",) and more.devices_of("server-1") == ("1", "2")
    with pytest.raises(DevicePlanError, match="has 3 GPUs for this run, and 4 are needed there"):
        more.extended(Demand("server-2", 1))
