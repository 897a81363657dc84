"""The worker's loop and its link, against an orchestrator that answers from a script."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from megatron_rl.records import GroupResult, GroupTask
from megatron_rl.rollouts import worker as worker_module
from megatron_rl.rollouts.worker import Worker, main
from megatron_rl.wire.access import KEY_HEADER
from megatron_rl.wire.client import AsyncControlClient, OrchestratorGoneError
from megatron_rl.wire.control import Ack, GroupReport, WorkOrder, WorkRequest, decode, encode
from tests.unit.inference.vllm.fake_vllm import serving


class FakeOrchestrator:
    """Hands out `orders` one by one, then waits; `failing` holds status codes to answer with first."""

    def __init__(self, orders=(), failing=()):
        self.orders, self.failing = list(orders), list(failing)
        self.requests: list[WorkRequest] = []
        self.reports: list[GroupReport] = []

    def app(self) -> Starlette:
        async def answer(request: Request) -> Response:
            assert request.headers[KEY_HEADER] == "secret"
            body = await request.body()
            if self.failing:
                return PlainTextResponse("not now", self.failing.pop(0))
            if request.url.path.endswith("/groups"):
                self.reports.append(decode(body, GroupReport))
                return Response(encode(Ack()))
            self.requests.append(decode(body, WorkRequest))
            while self.orders and callable(self.orders[0]) and not self.orders[0](self):
                await asyncio.sleep(0.01)
            order = self.orders.pop(0) if self.orders else WorkOrder(stop=True)
            return Response(encode(order if isinstance(order, WorkOrder) else WorkOrder()))

        return Starlette(routes=[Route("/work", answer, methods=["POST"]), Route("/groups", answer, methods=["POST"])])


class FakeSampler:
    def __init__(self, seconds=0.0):
        self.seconds, self.ended = seconds, []

    async def sample(self, group: GroupTask) -> GroupResult:
        try:
            await asyncio.sleep(self.seconds)
            if group.uid == "bug":
                raise KeyError("a fault of this program")
            return GroupResult(group.uid, group.prompt_index, group.attempt, group.server, failure="server", message="m")
        finally:
            self.ended.append(group.uid)


def tasks(*uids):
    return WorkOrder(tuple(GroupTask(uid, n, 0, 2, "http://s") for n, uid in enumerate(uids)))


def reported(number):
    """An order that comes when so many groups were reported."""
    return lambda orchestrator: len(orchestrator.reports) >= number


def run_worker(orchestrator: FakeOrchestrator, sampler: FakeSampler, **link):
    async def body(url):
        connection = AsyncControlClient(url, "secret", retry_s=0.01, **link)
        try:
            await asyncio.wait_for(Worker("w", sampler, connection).run(), 20)
        finally:
            await connection.close()

    with serving(orchestrator.app()) as url:
        asyncio.run(body(url))


def test_groups_are_sampled_and_reported():
    orchestrator = FakeOrchestrator([tasks("a", "b"), tasks("c"), reported(3)])
    run_worker(orchestrator, FakeSampler())
    assert sorted(r.result.uid for r in orchestrator.reports) == ["a", "b", "c"]
    assert all(r.worker == "w" and r.result.failure == "server" for r in orchestrator.reports)


def test_slots_are_what_is_free(monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_GROUPS", 3)
    orchestrator = FakeOrchestrator([tasks("a", "b"), tasks("c"), reported(3)])
    run_worker(orchestrator, FakeSampler(seconds=0.2))
    assert [r.slots for r in orchestrator.requests[:2]] == [3, 1] and all(r.slots >= 1 for r in orchestrator.requests)


def test_a_stop_cancels_what_is_in_flight():
    orchestrator, sampler = FakeOrchestrator([tasks("a", "b")]), FakeSampler(seconds=60)
    run_worker(orchestrator, sampler)
    assert sorted(sampler.ended) == ["a", "b"] and orchestrator.reports == []


def test_an_unexpected_error_ends_the_worker():
    orchestrator = FakeOrchestrator([tasks("bug"), lambda o: True, lambda o: True, lambda o: True])
    with pytest.raises(KeyError, match="a fault of this program"):
        run_worker(orchestrator, FakeSampler())


def test_an_orchestrator_that_is_briefly_away_is_asked_again():
    orchestrator = FakeOrchestrator([tasks("a"), reported(1)], failing=[503, 500])
    run_worker(orchestrator, FakeSampler())
    assert [r.result.uid for r in orchestrator.reports] == ["a"]


def test_an_orchestrator_that_stays_away_ends_the_worker():
    with pytest.raises(OrchestratorGoneError, match="no answer for 0.1 s, the last time: HTTP 503: not now"):
        run_worker(FakeOrchestrator(failing=[503] * 1000), FakeSampler(), patience_s=0.1)


def test_a_refusal_ends_the_worker_at_once():
    orchestrator = FakeOrchestrator(failing=[401])
    with pytest.raises(OrchestratorGoneError, match="/work: HTTP 401"):
        run_worker(orchestrator, FakeSampler())
    assert orchestrator.failing == [] and orchestrator.requests == []


def test_the_process_says_what_is_missing(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.delenv("MEGATRON_RL_KEY", raising=False)
    assert main([str(tmp_path), "--orchestrator", "http://127.0.0.1:1"]) == 2
    assert "MEGATRON_RL_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("MEGATRON_RL_KEY", "k")
    assert main([str(tmp_path), "--orchestrator", "http://127.0.0.1:1"]) == 1
    assert "holds no run (config.toml is not there)" in caplog.text
