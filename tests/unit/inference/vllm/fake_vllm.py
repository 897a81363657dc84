"""A stand-in for a vLLM server that answers with the JSON shapes of 0.30.0 or of 0.33.0, from random data that it remembers."""

import asyncio
import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, Router

from megatron_rl.records import ModelContract

NUM_LAYERS = 4
CONTRACT = ModelContract(vocab_size=50, moe_layers=(1, 3), num_experts=8, experts_per_token=3)


class FakeVllm:
    """`script` may hold functions, one a request, that get the answer and return what is sent instead (a dict or a Response)."""

    def __init__(
        self, *, keep_set_source: str = "processed_logprobs", num_tokens: int = 6, seed: int = 0, integer_ids: bool = False
    ):
        self.integer_ids = integer_ids  # as from 0.32
        self.source, self.num_tokens, self.rng = keep_set_source, num_tokens, np.random.default_rng(seed)
        self.requests: list[dict] = []
        self.span_questions: list[list[str]] = []
        self.truth: dict[str, dict] = {}
        self.version = 0
        self.updates_in_flight = True  # the second half of each completion is the next version's
        self.script: list = []
        self.delay_s = 0.0
        self.url = ""

    def sample(self, request: dict) -> dict:
        """The true arrays of one completion."""
        rng, count, vocab = self.rng, self.num_tokens, CONTRACT.vocab_size
        count = min(count, request["sampling_params"]["max_tokens"])
        sets = [rng.permutation(vocab)[: rng.integers(1, 5)] for _ in range(count)]
        probabilities = [rng.dirichlet(np.ones(len(s))) for s in sets]
        drawn = [int(rng.integers(len(s))) for s in sets]
        rows = len(request["token_ids"]) + count - 1
        routes = np.argsort(rng.random((rows, NUM_LAYERS, CONTRACT.num_experts)), axis=-1)[..., :3].astype(np.uint8)
        routes[:, [0, 2]] = 0  # dense layers
        return {
            "token_ids": [int(s[d]) for s, d in zip(sets, drawn, strict=True)],
            "logprobs": [float(np.log(p[d])) for p, d in zip(probabilities, drawn, strict=True)],
            "sets": [[int(i) for i in s] for s in sets],
            "set_logprobs": [np.log(p) for p in probabilities],
            "routes": routes,
            "spans": [[0, self.version]] + ([[count // 2, self.version + 1]] if self.updates_in_flight else []),
        }

    def answer(self, request: dict) -> dict:
        truth = self.truth[request["request_id"]] = self.sample(request)
        wanted = request["sampling_params"]["logprobs"]
        buffer = io.BytesIO()
        np.save(buffer, truth["routes"])
        content = []
        for t, token in enumerate(truth["token_ids"]):
            top = sorted(
                zip(truth["set_logprobs"][t].tolist(), truth["sets"][t], strict=True), key=lambda e: (e[1] != token, -e[0])
            )
            outside = [i for i in range(CONTRACT.vocab_size) if i not in truth["sets"][t]]
            top += [(-9999.0, i) for i in outside]
            entries = [self._entry(i, p) for p, i in top[: max(wanted, 1)]]
            content.append(self._entry(token, truth["logprobs"][t]) | {"top_logprobs": entries})
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "token_ids": truth["token_ids"],
            "routed_experts": base64.b64encode(buffer.getvalue()).decode(),
            "sampling_mask": truth["sets"] if self.source == "native" else None,
        }
        return {"request_id": request["request_id"], "model": "m", "choices": [choice], "usage": {}, "prompt_logprobs": None}

    def _entry(self, token: int, logprob: float) -> dict:
        if self.integer_ids:
            return {"token_id": token, "logprob": logprob, "rank": 1}
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}

    def app(self) -> Starlette:
        async def generate(request: Request) -> Response:
            body = json.loads(await request.body())
            self.requests.append(body)
            await asyncio.sleep(self.delay_s)
            answer = self.answer(body)
            if self.script:
                answer = self.script.pop(0)(answer)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        async def collective_rpc(request: Request) -> Response:
            body = json.loads(await request.body())
            assert body["method"] == "version_spans"
            (ids,) = body["args"]
            self.span_questions.append(ids)
            return JSONResponse({"results": [{i: self.truth[i]["spans"] for i in ids if i in self.truth}]})

        return Starlette(
            routes=[
                Route("/inference/v1/generate", generate, methods=["POST"]),
                Route("/collective_rpc", collective_rpc, methods=["POST"]),
            ]
        )


class _SharedServer:
    """One uvicorn in a thread for all fakes of a test session, each under its own path: starting one takes longer than a test."""

    def __init__(self) -> None:
        self.routes: list[Mount] = []
        self._url = ""

    def url(self) -> str:
        if not self._url:
            app = Router(routes=self.routes)
            server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
            threading.Thread(target=server.run, daemon=True).start()
            while not server.started:
                time.sleep(0.01)
            app.routes = self.routes
            self._url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        return self._url


_SHARED = _SharedServer()


@contextlib.contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Gives the app's URL; afterwards everything there is a 404."""
    path = f"/{time.monotonic_ns()}"
    mount = Mount(path, app=app)
    _SHARED.routes.append(mount)
    yield _SHARED.url() + path
    _SHARED.routes.remove(mount)


@contextlib.contextmanager
def running(server: FakeVllm) -> Iterator[FakeVllm]:
    with serving(server.app()) as url:
        server.url = url
        yield server
