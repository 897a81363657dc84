"""The trainer's client of the orchestrator, against a real HTTP server on a thread."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.trainer.steering import RendezvousTimeoutError, Steering
from megatron_rl.wire.access import KEY_HEADER
from megatron_rl.wire.client import OrchestratorGoneError
from megatron_rl.wire.control import (
    Ack,
    Order,
    OrderRequest,
    ProbeOrder,
    ProbeRequest,
    Rendezvous,
    RendezvousRequest,
    StepReport,
    decode,
    encode,
)


class Orchestrator:
    """Answers each route from a list; records what came."""

    def __init__(self):
        self.answers: dict[str, list] = {}
        self.received: list = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):  # the name that http.server asks for
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.received.append((self.path, self.headers[KEY_HEADER], body))
                answer = encode(outer.answers[self.path].pop(0))
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_): ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def orchestrator():
    o = Orchestrator()
    yield o
    o.close()


def test_orders_and_reports_travel_with_the_key(orchestrator):
    orchestrator.answers = {"/order": [Order("train", plan_file="plans/step_000003.json")], "/step": [Ack(stop=True)]}
    steering = Steering(orchestrator.url, "the key")
    assert steering.next_order(3) == Order("train", plan_file="plans/step_000003.json")
    assert steering.report(StepReport(3, {"loss": float("nan"), "grad_norm": 0.5})).stop
    (path, key, asked), (_, _, reported) = orchestrator.received
    assert (path, key, decode(asked, OrderRequest).step) == ("/order", "the key", 3)
    assert decode(reported, StepReport).metrics["grad_norm"] == 0.5


def answers(poll) -> list[str | None]:
    """Until it has its answer."""
    found = [poll()]
    while found[-1] is None:
        found.append(poll())
    return found


def test_a_probe_is_asked_for_until_it_is_ready(orchestrator):
    orchestrator.answers = {"/probe": [ProbeOrder(ready=False), ProbeOrder(ready=True, plan_file="plans/probe_000007.json")]}
    assert answers(Steering(orchestrator.url, "k").probe_poll(7, timeout_s=5)) == [None, "plans/probe_000007.json"]
    assert [decode(body, ProbeRequest).version for _, _, body in orchestrator.received] == [7, 7]


def test_a_probe_that_never_comes_is_given_up(orchestrator):
    orchestrator.answers = {"/probe": [ProbeOrder(ready=False)] * 10_000}
    assert answers(Steering(orchestrator.url, "k").probe_poll(7, timeout_s=0.05))[-1] == ""


def test_ranks_meet_where_the_first_one_serves(orchestrator):
    met = Rendezvous("127.0.0.1", 4321)
    orchestrator.answers = {"/rendezvous": [met, Rendezvous(), met]}
    assert Steering(orchestrator.url, "k").rendezvous(0, lambda host: 4321, timeout_s=5) == ("127.0.0.1", 4321)
    assert Steering(orchestrator.url, "k").rendezvous(3, lambda host: pytest.fail("only rank 0 serves"), timeout_s=5) == (
        "127.0.0.1",
        4321,
    )
    asked = [decode(body, RendezvousRequest) for _, _, body in orchestrator.received]
    assert [(m.rank, m.host, m.port) for m in asked] == [(0, "127.0.0.1", 4321), (3, "", 0), (3, "", 0)]


def test_a_first_rank_that_never_comes_is_named(orchestrator):
    orchestrator.answers = {"/rendezvous": [Rendezvous()] * 10_000}
    with pytest.raises(
        RendezvousTimeoutError,
        match=r"has not published the address of the ranks' store within 0\.05 s .*; see logs/trainer-0\.log",
    ):
        Steering(orchestrator.url, "k").rendezvous(1, lambda host: 0, timeout_s=0.05)


def test_an_orchestrator_that_is_gone_ends_the_trainer(orchestrator):
    orchestrator.close()
    with pytest.raises(OrchestratorGoneError, match="/order: no answer for 0.3 s, the last time: ConnectError"):
        Steering(orchestrator.url, "k", patience_s=0.3).next_order(0)
