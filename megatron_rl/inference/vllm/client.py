"""The client of one vLLM server: token ids in, token ids out, with all that the trainer needs to replay the sampling.

Requests carry no seed: on a CPU a seeded request kills the engine when its prefill is chunked. They are never streamed: the
streaming route leaves the sampling mask out, and reports a dead engine inside a 200.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.engine import KeepSetSource
from megatron_rl.inference.errors import PromptError, ServerError
from megatron_rl.inference.vllm.completion import decode_completion, num_logprobs
from megatron_rl.records import ContractError, ModelContract, Sampling
from megatron_rl.wire.access import with_key

_SPAN_WINDOW_S = 0.005
"""Requests that end within this time ask for their version spans in one call: each call delays the engine a little."""

_KEEP_ALIVE_S = 2.0  # below uvicorn's 5 s, or a request may be sent on a connection that the server is closing

_REFUSED = (400, 422)
"""vLLM's statuses for a request that cannot be served; another server would refuse it, too."""


class VllmClient:
    """See `SamplingClient`; the arguments are those of `InferenceEngine.sampling_client`."""

    def __init__(
        self, url: str, contract: ModelContract, *, key: str, keep_set_source: KeepSetSource, max_keep_set: int, timeout_s: float
    ) -> None:
        self.url, self._contract = url, contract
        self._source, self._max_keep_set, self._timeout_s = keep_set_source, max_keep_set, timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S)
        self._http = httpx.AsyncClient(
            base_url=url, headers=with_key(key), timeout=httpx.Timeout(None, connect=10.0), limits=limits, trust_env=False
        )
        self._spans = _SpanQuestions(self)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """See `SamplingClient.generate`."""
        request = {
            "request_id": request_id,
            "token_ids": [int(i) for i in prompt_ids],
            "sampling_params": self._sampling_params(sampling, stop_token_ids),
        }
        answer = await self.post("/inference/v1/generate", request)
        choice = _only_choice(self.url, answer)
        spans = _own_spans(self.url, choice) or await self._spans.ask(request_id)
        try:  # in a thread: a long answer holds a million entries
            return await asyncio.to_thread(
                decode_completion, request_id, choice, spans, sampling, self._source, self._contract.moe_layers
            )
        except ContractError:
            raise
        except (LookupError, TypeError, ValueError) as error:
            what = f"the answer has an unexpected shape ({type(error).__name__}: {error})"
            raise ServerError(self.url, "POST /inference/v1/generate", what) from error

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers with.

        Raises:
            ServerError: No answer within the time, or an error.
            PromptError: The server refuses the request as bad input.
        """
        asked = f"POST {path}"
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.post(path, json=body)
        except TimeoutError as error:
            raise ServerError(self.url, asked, f"no answer within {self._timeout_s:g} s (servers.request_timeout_s)") from error
        except httpx.HTTPError as error:
            raise ServerError(self.url, asked, f"{type(error).__name__}: {error}") from error
        if response.status_code in _REFUSED:
            raise PromptError(f"{self.url}: {asked}: HTTP {response.status_code}: {response.text[:300]}")
        if response.status_code != 200:
            raise ServerError(self.url, asked, f"HTTP {response.status_code}: {response.text[:300]}")
        try:
            answer = response.json()
        except ValueError as error:
            raise ServerError(self.url, asked, f"no JSON in {response.text[:200]!r}") from error
        if not isinstance(answer, dict) or answer.get("error"):
            raise ServerError(self.url, asked, f"an error inside a 200: {str(answer)[:300]}")
        return answer

    async def close(self) -> None:
        """Release the connections."""
        await self._http.aclose()

    def _sampling_params(self, sampling: Sampling, stop_token_ids: Sequence[int]) -> dict[str, Any]:
        vocab_size = self._contract.vocab_size
        # vLLM takes 0 for "no limit", but with its native mask wants a limit on every request: the full vocabulary is none.
        # Where nothing is truncated, the server is started without the mask.
        has_mask = self._source == "native" and sampling.truncates
        top_k = sampling.top_k or (vocab_size if has_mask else 0)
        return {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": top_k,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": [int(i) for i in stop_token_ids],
            "logprobs": num_logprobs(sampling, self._source, self._max_keep_set, vocab_size),
        }


def _only_choice(url: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The one choice of a generate response. An aborted request returns as an ordinary answer with another finish reason."""
    choices = answer.get("choices") or [{}]
    choice = choices[0]
    if len(choices) != 1 or choice.get("finish_reason") not in ("stop", "length") or not choice.get("logprobs"):
        shape = {key: choice.get(key) for key in ("index", "finish_reason")} | {"choices": len(choices)}
        raise ServerError(url, "POST /inference/v1/generate", f"not one finished choice with log-probs: {shape}")
    return choice


def _own_spans(url: str, choice: dict[str, Any]) -> list[list[int]] | None:
    """[[first generated token, version], ...] where the engine stamps its tokens (vLLM from 0.32); None elsewhere."""
    spans = choice.get("weight_versions")
    if not spans:
        return None
    try:
        ends = [span["end"] for span in spans]
        if ends != [*(span["start"] for span in spans[1:]), len(choice["token_ids"])]:
            what = f"version spans {spans} do not cover the {len(choice['token_ids'])} tokens one after the other"
            raise ServerError(url, "POST /inference/v1/generate", what)
        return [[span["start"], int(span["version"])] for span in spans]
    except (ValueError, TypeError, KeyError) as error:  # before its first update a server reports 'default'
        raise ServerError(
            url, "POST /inference/v1/generate", f"version spans {spans}: no policy version was sent to it yet"
        ) from error


class _SpanQuestions:
    """Asks the server which policy version sampled which token, for all requests that end at about the same time in one call."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[list[list[int]]]] = {}
        self._running: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly

    async def ask(self, request_id: str) -> list[list[int]]:
        """[[first generated token, version], ...]."""
        if not self._waiting:
            task = asyncio.create_task(self._collect_and_ask())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        return await future

    async def _collect_and_ask(self) -> None:
        await asyncio.sleep(_SPAN_WINDOW_S)
        futures, self._waiting = self._waiting, {}
        spans: dict[str, list[list[int]]] = {}
        fault: Exception | str = "the server does not know it"
        try:
            answer = await self._client.post("/collective_rpc", {"method": "version_spans", "args": [list(futures)]})
            spans = answer["results"][0]  # every rank of the server answers the same
        except (ServerError, LookupError, TypeError) as error:
            fault = error
        for request_id, future in futures.items():
            if future.done():  # its request was cancelled meanwhile
                continue
            if request_id in spans:
                future.set_result(spans[request_id])
            else:
                future.set_exception(ServerError(self._client.url, f"version spans of {request_id}", str(fault)))
