"""Processes on other nodes: real agents on this machine, which talk to the orchestrator's side by HTTP.

Not proved here: Slurm (tests/e2e).
"""

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path

import pytest

from megatron_rl.orchestrator import control_app, listen, serving
from megatron_rl.processes import Command, Nodes, ProcessError
from megatron_rl.processes.addresses import AddressError, address_of_interface
from megatron_rl.processes.agent import Agent, devices_here, gloo_interface, own_address
from megatron_rl.wire.client import OrchestratorGoneError
from megatron_rl.wire.control import Status
from megatron_rl.wire.nodes import NodeRequest, OrchestratorPlace, ProcessEnded, StopOrder

KEY = "k" * 32


def python(tmp_path, name: str, code: str, **env: str) -> Command:
    return Command(name, [sys.executable, "-c", code], tmp_path / f"{name}.log", env)


def request(index: int = 0, num_done: int = 0, wait_s: float = 0.0) -> NodeRequest:
    return NodeRequest("trainer", index, "host", "127.0.0.1", (), (2001, 2002), num_done, wait_s)


@contextlib.asynccontextmanager
async def cluster(num_nodes: int):
    """Nodes of one role whose agents have joined."""
    nodes, listener = Nodes({"trainer": num_nodes}), listen("127.0.0.1")
    place = OrchestratorPlace("1.0", "here", f"http://127.0.0.1:{listener.getsockname()[1]}")
    async with serving(control_app(KEY, nodes.handlers, lambda: Status(0, 0, {})), listener):
        agents = [asyncio.create_task(Agent("trainer", i, place, KEY, "127.0.0.1", ("0", "1")).run()) for i in range(num_nodes)]
        try:
            await nodes.wait_until_joined(60.0)
            yield nodes, agents
        finally:
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)


async def ended(process, timeout_s: float = 60.0) -> int:
    async with asyncio.timeout(timeout_s):
        while (status := process.poll()) is None:
            await asyncio.sleep(0.02)
    return status


async def first_line_in(log: Path, timeout_s: float = 60.0) -> None:
    """Waits until the process has written a line."""
    async with asyncio.timeout(timeout_s):
        while not log.exists() or "\n" not in log.read_text():
            await asyncio.sleep(0.02)


def test_a_process_runs_on_its_node_and_its_exit_status_is_reported(tmp_path):
    async def scene():
        async with cluster(2) as (nodes, _):
            node = nodes.node("trainer", 1)
            code = "import os, sys; print(os.environ['GIVEN'], os.environ['MEGATRON_RL_ADDRESS']); sys.exit(3)"
            process = nodes.start(node, python(tmp_path, "p", code, GIVEN="x"))
            assert await ended(process) == 3
            return process.failure()

    failure = asyncio.run(scene())
    assert "p on " in failure and "ended with status 3" in failure and "x 127.0.0.1" in failure


def test_processes_are_stopped_by_sigterm_and_after_the_grace_by_sigkill(tmp_path):
    ignores_sigterm = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )

    async def scene():
        async with cluster(1) as (nodes, agents):
            node = nodes.node("trainer", 0)
            ordinary = nodes.start(node, python(tmp_path, "a", "import time; time.sleep(60)"))
            stubborn = nodes.start(node, python(tmp_path, "b", ignores_sigterm))
            await first_line_in(tmp_path / "b.log")
            await nodes.stop([ordinary], grace_s=60.0)
            await nodes.stop([stubborn], grace_s=0.5)
            await ended(stubborn)
            await nodes.end(grace_s=60.0)
            await asyncio.wait_for(agents[0], 60.0)  # it ends by itself
            return ordinary.poll(), stubborn.poll()

    assert asyncio.run(scene()) == (-signal.SIGTERM, -signal.SIGKILL)


def test_a_program_that_cannot_be_started_leaves_the_reason_in_its_log(tmp_path):
    async def scene():
        async with cluster(1) as (nodes, _):
            process = nodes.start(nodes.node("trainer", 0), Command("none", ["no-such-program"], tmp_path / "none.log", {}))
            assert await ended(process) == 127
            return process.failure()

    assert "no-such-program" in asyncio.run(scene())


def test_processes_end_with_their_agent(tmp_path):
    log = tmp_path / "a.log"

    async def scene():
        async with cluster(1) as (nodes, agents):
            nodes.start(
                nodes.node("trainer", 0), python(tmp_path, "a", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
            )
            await first_line_in(log)
            agents[0].cancel()
            await asyncio.gather(*agents, return_exceptions=True)

    asyncio.run(scene())
    assert not Path(f"/proc/{int(log.read_text())}").exists()


def test_an_agent_with_another_key_is_refused():
    async def scene():
        listener = listen("127.0.0.1")
        place = OrchestratorPlace("1.0", "here", f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with serving(control_app(KEY, Nodes({}).handlers, lambda: Status(0, 0, {})), listener):
            await Agent("trainer", 0, place, "x" * 32, "127.0.0.1", ()).run()

    with pytest.raises(OrchestratorGoneError, match="/node: HTTP 401: .*this run's key"):
        asyncio.run(scene())


def test_an_answer_that_was_lost_is_sent_again():
    async def scene():
        nodes = Nodes({"trainer": 1})
        await nodes.on_node(request())
        for number in range(2):
            nodes.order(nodes.node("trainer", 0), StopOrder(f"p{number}", kill=True))
        first, again = await nodes.on_node(request()), await nodes.on_node(request())
        rest = await nodes.on_node(request(num_done=1))
        return first, again, rest

    first, again, rest = asyncio.run(scene())
    assert first == again and [o.process for o in first.orders] == ["p0", "p1"] and [o.process for o in rest.orders] == ["p1"]


def test_a_silent_node_is_lost_with_its_processes(tmp_path):
    now = 0.0

    async def scene():
        nonlocal now
        nodes = Nodes({"trainer": 2}, patience_s=5.0, clock=lambda: now)
        await nodes.on_node(request(0))
        await nodes.on_node(request(1))
        process = nodes.start(nodes.node("trainer", 1), python(tmp_path, "p", ""))
        now = 4.0
        await nodes.on_node(request(0))
        assert process.poll() is None
        now = 6.0
        assert process.poll() == -9 and "agent is silent" in process.failure()
        await nodes.on_ended(ProcessEnded("an old one", 0))  # of an unknown process: ignored
        assert nodes.node("trainer", 0).index == 0
        with pytest.raises(ProcessError, match=r"trainer node 1 \(host\) is lost"):
            nodes.node("trainer", 1)

    asyncio.run(scene())


def test_nodes_that_do_not_join_are_named():
    async def scene():
        nodes = Nodes({"trainer": 1, "rollouts": 2})
        await nodes.on_node(request())
        await nodes.wait_until_joined(0.01)

    with pytest.raises(ProcessError, match="have not joined: rollouts 0, rollouts 1"):
        asyncio.run(scene())


def test_each_port_is_assigned_once():
    async def scene():
        nodes = Nodes({"trainer": 1})
        await nodes.on_node(request())
        node = nodes.node("trainer", 0)
        taken = [node.take_port(), node.take_port()]
        with pytest.raises(ProcessError, match="no free port left"):
            node.take_port()
        return taken

    assert sorted(asyncio.run(scene())) == [2001, 2002]


def test_a_node_announces_an_address_that_other_nodes_can_reach():
    assert address_of_interface("lo") == "127.0.0.1"
    with pytest.raises(AddressError, match="ib77.*its interfaces: .*lo"):
        address_of_interface("ib77")
    assert own_address(OrchestratorPlace("1.0", socket.gethostname(), "http://127.0.0.1:80"), None) == "127.0.0.1"
    with pytest.raises(AddressError, match=r"slurm\.interface"):
        own_address(OrchestratorPlace("1.0", "another-host", "http://127.0.1.1:80"), None)


def test_processes_use_the_interface_of_their_nodes_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_interface("192.0.2.7") == {}  # of no interface here
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # exported by slurm.prologue
    assert gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize(("given", "expected"), [("4,5,6,7", ("4", "5")), (None, ("0", "1"))])
def test_devices_are_those_that_slurm_gave(monkeypatch, given, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given) if given else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_here(2) == expected
