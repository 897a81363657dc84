"""The clients of the orchestrator's control server: a blocking one for the trainer, an asynchronous one for workers and agents.

Both follow one rule. A message is sent again while the orchestrator cannot be reached or answers with a server error (5xx), for
at most `patience_s` from its first attempt. Any other status means that the orchestrator is there and refuses: no later attempt
would succeed. Both end in OrchestratorGoneError. A message may therefore arrive twice; the orchestrator's handlers allow it.
"""

import asyncio
import os
import time
from typing import TypeVar

import httpx

from megatron_rl.errors import RunError
from megatron_rl.wire.access import with_key
from megatron_rl.wire.control import decode, encode
from megatron_rl.wire.nodes import ADDRESS_VARIABLE
from megatron_rl.wire.stores import address_towards

T = TypeVar("T")

_JSON = {"content-type": "application/json"}
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""Seconds for one attempt; the longest wait that a client asks for within a request is 20 s."""


class OrchestratorGoneError(RunError):
    """The orchestrator has not answered for so long that it must have exited, or it refuses this process."""


class ControlClient:
    """Blocking; used from one thread.

    Args:
        url: The orchestrator's, such as `http://127.0.0.1:8000`.
        key: The run's.
        patience_s: How long an orchestrator that does not answer is asked again.
        retry_s: Pause between two attempts.
    """

    def __init__(self, url: str, key: str, *, patience_s: float = 60.0, retry_s: float = 0.5) -> None:
        self.url, self.key, self.patience_s = url, key, patience_s
        self._retry_s = retry_s
        self._http = httpx.Client(base_url=url, headers=with_key(key) | _JSON, timeout=_TIMEOUT, trust_env=False)

    def send(self, path: str, message: object, answer: type[T]) -> T:
        """The orchestrator's answer, which is of type `answer`.

        Raises:
            OrchestratorGoneError: It refuses the message, or has not answered for `patience_s`.
        """
        attempts = _Attempts(self.url + path, self.patience_s)
        content = encode(message)
        while True:
            try:
                response = self._http.post(path, content=content)
            except httpx.RequestError as error:
                attempts.failed(f"{type(error).__name__}: {error}")
            else:
                if attempts.succeeded(response):
                    return decode(response.content, answer)
            time.sleep(self._retry_s)

    def close(self) -> None:
        """Release the connections."""
        self._http.close()


class AsyncControlClient:
    """`ControlClient` for an event loop; several messages may be on their way at once."""

    def __init__(self, url: str, key: str, *, patience_s: float = 60.0, retry_s: float = 0.5) -> None:
        self.url, self.key, self.patience_s = url, key, patience_s
        self._retry_s = retry_s
        self._http = httpx.AsyncClient(base_url=url, headers=with_key(key) | _JSON, timeout=_TIMEOUT, trust_env=False)

    async def send(self, path: str, message: object, answer: type[T]) -> T:
        """See `ControlClient.send`."""
        attempts = _Attempts(self.url + path, self.patience_s)
        content = encode(message)
        while True:
            try:
                response = await self._http.post(path, content=content)
            except httpx.RequestError as error:
                attempts.failed(f"{type(error).__name__}: {error}")
            else:
                if attempts.succeeded(response):
                    return decode(response.content, answer)
            await asyncio.sleep(self._retry_s)

    async def close(self) -> None:
        """Release the connections."""
        await self._http.aclose()


def own_address(orchestrator: str) -> str:
    """This machine's address in the run: on a cluster the one that its agent found, else that on the route to the orchestrator.

    Args:
        orchestrator: Its URL.
    """
    url = httpx.URL(orchestrator)
    return os.environ.get(ADDRESS_VARIABLE) or address_towards(url.host, url.port or 80)


class _Attempts:
    """One message's attempts: decides whether there is another one."""

    def __init__(self, target: str, patience_s: float) -> None:
        self._target, self._patience_s = target, patience_s
        self._deadline = time.monotonic() + patience_s

    def succeeded(self, response: httpx.Response) -> bool:
        """False: try again. Raises OrchestratorGoneError."""
        if response.status_code == 200:
            return True
        fault = f"HTTP {response.status_code}: {response.text[:300]}"
        if response.status_code < 500:
            raise OrchestratorGoneError(f"{self._target}: {fault}")
        self.failed(fault)
        return False

    def failed(self, fault: str) -> None:
        """Return if there is time for another attempt. Raises OrchestratorGoneError."""
        if time.monotonic() > self._deadline:
            raise OrchestratorGoneError(
                f"{self._target}: no answer for {self._patience_s:g} s, the last time: {fault}. "
                "The end of the orchestrator's output says why"
            )
