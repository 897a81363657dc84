"""The orchestrator's HTTP side: one POST route for each message type, protected by the run's key."""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from megatron_rl.wire.access import KEY_HEADER
from megatron_rl.wire.control import Status, decode, encode

Handler = Callable[..., Awaitable[object]]


def control_app(key: str, handlers: Mapping[str, tuple[type, Handler]], status: Callable[[], Status]) -> Starlette:
    """handlers: path to (message type, coroutine that takes the message and returns the answer)."""

    def allowed(request: Request) -> bool:
        return hmac.compare_digest(request.headers.get(KEY_HEADER, "").encode(), key.encode())

    def post(kind: type[Any], handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not allowed(request):
                return PlainTextResponse(f"{request.url.path}: the header {KEY_HEADER} does not hold this run's key", 401)
            try:
                message = decode(await request.body(), kind)
            except ClientDisconnect:  # a worker that has the order to stop cancels its requests
                return Response(status_code=400)
            except ValidationError as error:
                return PlainTextResponse(f"{request.url.path}: not a {kind.__name__}: {error}", 400)
            return Response(encode(await handler(message)), media_type="application/json")

        return endpoint

    async def get_status(request: Request) -> Response:
        if not allowed(request):
            return PlainTextResponse("the run's key is missing", 401)
        return Response(encode(status()), media_type="application/json")

    routes = [Route(path, post(kind, handler), methods=["POST"]) for path, (kind, handler) in handlers.items()]
    return Starlette(routes=[*routes, Route("/status", get_status, methods=["GET"])])


class _WithoutSignals(uvicorn.Server):
    """Ctrl-C belongs to the orchestrator's loop, which stops everything in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Starlette, listener: socket.socket) -> AsyncIterator[None]:
    """The app on a socket that already listens, for as long as the block runs."""
    # Connections are kept for longer than clients keep them idle, so that none is closed while a request is on its way.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=600, timeout_graceful_shutdown=2
    )
    server = _WithoutSignals(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens; port 0: on a free port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1024)
    return listener
