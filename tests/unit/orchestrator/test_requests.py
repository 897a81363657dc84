"""Servers are added and removed by files in the run's folder, as the command line writes them."""

import asyncio
import threading
import time

import pytest

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator import ServersRequest, ask
from megatron_rl.orchestrator.fleet import FleetError, Server
from megatron_rl.orchestrator.requests import RequestError, Requests

SECTIONS = {"run": {"name": "t", "steps": 6}, "model": {"path": "/m"}, "task": {"name": "t"}}


class FakeFleet:
    def __init__(self) -> None:
        self.servers = [Server(0, "ready", "http://s0"), Server(1, "ready", "http://s1")]
        self.removed = []

    def add(self):
        self.servers.append(Server(len(self.servers)))
        return len(self.servers) - 1

    def remove(self, slot):
        if len(self.removed) == len(self.servers) - 1:
            raise FleetError("server is the last one")
        self.removed.append(slot)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(Config.model_validate(SECTIONS))
    return folder


@pytest.fixture
def fleet(folder):
    """Of a run in progress, on a thread."""
    fleet, requests_loop = FakeFleet(), asyncio.new_event_loop()
    following = Requests(folder, fleet).follow()
    task = requests_loop.create_task(following)
    thread = threading.Thread(target=lambda: requests_loop.run_until_complete(asyncio.gather(task, return_exceptions=True)))
    thread.start()
    yield fleet
    requests_loop.call_soon_threadsafe(task.cancel)
    thread.join()
    requests_loop.close()


def test_servers_are_added_and_removed_by_number_and_by_url(folder, fleet):
    assert "servers 2, 3 are starting" in ask(folder, ServersRequest("add", count=2))
    assert "servers 0, 1 are removed" in ask(folder, ServersRequest("remove", which=("0", "http://s1")))
    assert fleet.removed == [0, 1]
    assert list(folder.requests.iterdir()) == []


def test_what_the_fleet_refuses_comes_back_with_its_reason(folder, fleet):
    with pytest.raises(RequestError, match=r"there is no server 'http://s7'; servers are 0 \(http://s0\), 1 \(http://s1\)"):
        ask(folder, ServersRequest("remove", which=("0", "http://s7")))
    assert fleet.removed == []  # all of a request, or nothing of it that can be known before
    with pytest.raises(RequestError, match="the last one"):
        ask(folder, ServersRequest("remove", which=("0", "1")))


def test_a_run_that_does_not_answer_is_reported_and_nothing_is_left_for_its_next_start(folder):
    with pytest.raises(RequestError, match="has not answered within 0.3 s: `megatron-rl status .*` shows whether it runs"):
        ask(folder, ServersRequest("add", count=1), timeout_s=0.3)
    assert list(folder.requests.iterdir()) == []


def test_a_half_written_or_foreign_request_is_refused(folder, fleet):
    (folder.requests / "ask_x.json").write_text('{"action": "format", "which": []}')
    answer = folder.requests / "answer_x.json"
    deadline = time.monotonic() + 60
    while not answer.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert b'"done":false' in answer.read_bytes()
