"""Access to a rollout server (`--middleware megatron_rl.inference.vllm.plugin.access.RequireKey`).

vLLM's own `--api-key` guards the routes under /v1, /v2 and /inference only. Whoever reaches the others can pause the server, call
any method of its workers, replace the weights, and even generate (/invocations). Here everything but GET /health needs the run's
key, also routes that a later vLLM adds, and paths without a route.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_rl.wire.access import KEY_HEADER, key_from_environment

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_REFUSAL = json.dumps({"error": {"message": f"the header {KEY_HEADER} does not hold this run's key", "code": 401}}).encode()


class RequireKey:
    """ASGI middleware. A server without a key in its environment does not start (KeyMissingError)."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._key = key_from_environment().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == "/health" and scope["method"] == "GET":
            return True
        given = [value for name, value in scope["headers"] if name == KEY_HEADER.encode()]
        return len(given) == 1 and hmac.compare_digest(given[0], self._key)
