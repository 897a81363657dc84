"""Which requests a rollout server accepts: vLLM's application with our middleware, every route that it lists.

Not proved here: that the server process loads the middleware from its command line (test_vllm_plugin's server does, and says so).
"""

import asyncio
import re

import httpx
import pytest

from megatron_rl.inference.engine import ServerSettings
from megatron_rl.inference.vllm.plugin.access import RequireKey
from megatron_rl.inference.vllm.server import server_command
from megatron_rl.wire.access import KEY_HEADER, KEY_VARIABLE, KeyMissingError, with_key

KEY = "0123456789abcdef"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


@pytest.fixture(scope="module")
def app():
    """As `vllm.entrypoints.openai.api_server` builds it from the command line of a rollout server."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    argv, env = server_command(
        ServerSettings(
            "/models/none",
            "127.0.0.1",
            1,
            device="cpu",
            dtype="float32",
            max_sequence_length=64,
            max_num_seqs=2,
            load_format="dummy",
            keep_set_source="processed_logprobs",
            has_moe_layers=True,
            max_keep_set=8,
            weight_transport="gloo",
            key=KEY,
            seed=1,
            kv_cache_gib=1,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv[3:])
        built = build_app(args, ("generate",))
        built.build_middleware_stack()  # reads the key, as the first request would
        yield built


def paths_of(routes, prefix="") -> set[str]:
    """Every path that the application lists, those of mounted applications too, with a value for each parameter."""
    found = set()
    for route in routes:
        path = prefix + getattr(route, "path", "")
        found |= paths_of(route.routes, path) if getattr(route, "routes", None) else {re.sub(r"{[^}]*}", "x", path)}
    return found


def ask(app, headers, paths):
    """(method, path) to status; an exception inside of the application counts as 500: the request has passed the middleware."""

    async def body():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
            return {(m, p): (await client.request(m, p)).status_code for p in paths for m in METHODS}

    return asyncio.run(body())


def test_every_route_but_health_needs_the_key(app):
    paths = paths_of(app.routes)
    must_be_among = {
        "/pause",
        "/resume",
        "/collective_rpc",
        "/update_weights",
        "/init_weight_transfer_engine",
        "/inference/v1/generate",
        "/invocations",
        "/metrics",
        "/openapi.json",
        "/v1/completions",
        "/health",
    }
    assert must_be_among <= paths, must_be_among - paths
    strange = {"/", "/nowhere", "//health", "/health/", "/health/../pause", "/HEALTH", "/%68ealth/x"}
    for headers in ({}, {KEY_HEADER: "wrong"}, {KEY_HEADER: ""}, {"authorization": f"Bearer {KEY}"}):
        open_ones = {asked for asked, status in ask(app, headers, paths | strange).items() if status != 401}
        assert open_ones == {("GET", "/health")}


def test_with_the_key_the_application_is_reached(app):
    statuses = ask(app, with_key(KEY), {"/openapi.json", "/v1/completions", "/nowhere"})
    assert statuses["GET", "/openapi.json"] == 200 and statuses["GET", "/nowhere"] == 404
    assert statuses["POST", "/v1/completions"] not in (401, 404)


def test_a_websocket_is_closed_without_the_key(app):
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    asyncio.run(
        app({"type": "websocket", "path": "/v1/realtime", "headers": [], "query_string": b"", "scheme": "ws"}, receive, send)
    )
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_no_middleware_without_a_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(KeyMissingError, match=KEY_VARIABLE):
        RequireKey(None)
