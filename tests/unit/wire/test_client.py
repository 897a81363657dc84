"""The control clients, blocking and asynchronous: one retry policy, against a real HTTP server that answers from a script."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.wire.access import KEY_HEADER
from megatron_rl.wire.client import AsyncControlClient, ControlClient, OrchestratorGoneError
from megatron_rl.wire.control import Ack, Progress, decode, encode

MESSAGE = Progress("export", 1, 2, {"loss": float("inf")})


class Server:
    """`statuses`: answered one by one, then 200."""

    def __init__(self, statuses=()):
        self.statuses, self.received = list(statuses), []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.received.append((self.path, self.headers[KEY_HEADER], decode(body, Progress)))
                status = outer.statuses.pop(0) if outer.statuses else 200
                answer = encode(Ack(stop=True)) if status == 200 else b"not now"
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_): ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def send_blocking(url, patience_s):
    client = ControlClient(url, "the key", patience_s=patience_s, retry_s=0.01)
    try:
        return client.send("/progress", MESSAGE, Ack)
    finally:
        client.close()


def send_async(url, patience_s):
    async def body():
        client = AsyncControlClient(url, "the key", patience_s=patience_s, retry_s=0.01)
        try:
            return await client.send("/progress", MESSAGE, Ack)
        finally:
            await client.close()

    return asyncio.run(body())


@pytest.fixture(params=[send_blocking, send_async])
def send(request):
    return request.param


def sent(send, *, statuses=(), patience_s=20.0, is_closed=False):
    """The answer or the error, and what the server received."""
    server = Server(statuses)
    if is_closed:
        server.close()
    try:
        return send(server.url, patience_s), server.received
    except OrchestratorGoneError as error:
        return error, server.received
    finally:
        if not is_closed:
            server.close()


def test_a_server_error_is_tried_again(send):
    answer, received = sent(send, statuses=[503, 500])
    assert answer == Ack(stop=True)
    assert received == [("/progress", "the key", MESSAGE)] * 3


def test_a_refusal_is_not_tried_again(send):
    error, received = sent(send, statuses=[401])
    assert "/progress: HTTP 401: not now" in str(error) and len(received) == 1


def test_server_errors_are_borne_for_a_while(send):
    error, received = sent(send, statuses=[503] * 1000, patience_s=0.1)
    assert "/progress: no answer for 0.1 s, the last time: HTTP 503: not now" in str(error) and len(received) > 1


def test_a_server_that_is_not_there_is_gone_after_a_while(send):
    error, _ = sent(send, patience_s=0.1, is_closed=True)
    assert "no answer for 0.1 s, the last time: ConnectError" in str(error)
