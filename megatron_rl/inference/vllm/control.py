"""The routes of one rollout server that a weight update needs (vLLM serves them under VLLM_SERVER_DEV_MODE=1)."""

from collections.abc import Mapping
from typing import Any

import httpx

from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import ServerAddress


class VllmControl:
    """See `ServerControl`; the arguments are those of `InferenceEngine.server_control`. The senders use further calls of vLLM."""

    def __init__(self, address: ServerAddress, client: httpx.Client, timeout_s: float) -> None:
        self.address = address
        self._client = client
        self._timeout_s = timeout_s

    def pause(self) -> None:
        """Freeze all requests where they are, and drop the KV and prefix caches.

        vLLM's default, `clear_cache=true`, is what we want: with the caches kept, a request would continue with new weights over
        keys and values of the old ones, a mixture that no version's forward pass gives (log-probs off by 2.5 in a test), and a
        later prompt with the same prefix would hit them too. With them dropped, each request is recomputed under the new weights
        on resume, so a token's log-prob is that of the version that sampled it, given everything before it.
        """
        self._post("/pause?mode=keep&clear_cache=true")

    def resume(self) -> None:
        """Continue the paused requests."""
        self._post("/resume")

    def join_group(self, init_info: dict) -> None:
        """Have the workers join the sender's group; returns when all have."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def leave_group(self) -> None:
        """Have the workers destroy their communicator, if they have one; all of them have answered when it returns."""
        self._post("/shutdown_weight_transfer_engine")

    def num_workers(self, *, of_all_replicas: bool = True) -> int:
        """How many processes hold weights: tensor times pipeline times, `of_all_replicas`, data parallelism."""
        asked = f"/get_world_size?include_dp={str(of_all_replicas).lower()}"
        return int(self._send("GET", asked, None, self._timeout_s)["world_size"])

    def start_update(self) -> None:
        """The model is no version's from here on."""
        self._post("/start_weight_update")

    def receive(self, announcement: Mapping[str, Any]) -> None:
        """Announce the stream; returns when the server has received and loaded all of it, however long that takes."""
        self._send("POST", "/update_weights", {"update_info": dict(announcement)}, timeout_s=None)

    def finish_update(self, version: int) -> None:
        """Raises ServerError where the workers find the update incomplete."""
        self._post("/finish_weight_update", {"weight_version": str(version)})

    def reset_prefix_cache(self) -> None:
        """Raises ServerError where blocks of the old weights stay in use."""
        answer = self._post("/reset_prefix_cache")
        if not answer.get("success"):  # a plain 200: some request still holds blocks
            reason = f"answered {answer}; blocks of the old weights are still in use"
            raise ServerError(self.address.name, "/reset_prefix_cache", reason)

    def weight_version(self) -> str:
        """What the server's engine reports: the text that `finish_update` sent, "default" before the first update."""
        return str(self._send("GET", "/weight_info", None, self._timeout_s).get("weight_version"))

    def call_workers(self, method: str, *args: object) -> list:
        """Call a method of the worker class on every worker; the answers by rank."""
        return self._post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def _post(self, route: str, body: dict | None = None) -> dict:
        return self._send("POST", route, body, self._timeout_s)

    def _send(self, method: str, route: str, body: dict | None, timeout_s: float | None) -> dict:
        try:
            reply = self._client.request(method, self.address.url + route, json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise ServerError(self.address.name, route, f"no answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServerError(self.address.name, route, f"{type(error).__name__}: {error}") from error
        if reply.status_code != 200:
            raise ServerError(self.address.name, route, f"status {reply.status_code}: {_error_text(reply)}")
        return reply.json()


def _error_text(reply: httpx.Response) -> str:
    """vLLM reports errors as {"error": {"message": ...}}; anything else is taken as it is."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text
