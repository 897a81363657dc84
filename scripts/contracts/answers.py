"""Answers of /inference/v1/generate, made by vLLM's own classes and the functions that fill them, and what is true of them."""

import asyncio
import base64
import inspect
import io
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple
from unittest.mock import MagicMock

import httpx
import numpy as np
import pydantic

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.errors import ServerError

from .program import CONTRACT, SAMPLINGS, client_over
from .source import execute

NUM_LAYERS = 4
PROMPT = [3, 1, 4]
TOKENS = [17, 5, 0, 42]
SETS = [[2, 17], [5], [0, 9, 33], [8, 42]]  # ascending, as the mask lists them; one of them has a single token
MASS = [[0.25, 0.75], [1.0], [0.5, 0.3, 0.2], [0.4, 0.6]]
VERSIONS = ["7", "7", "8", "8"]
CASES = {
    "native, truncated": np.dtype("u1"),
    "processed_logprobs, truncated": np.dtype("u2"),
    "native, untruncated": np.dtype("i4"),
    "processed_logprobs, untruncated": None,  # a dense model: no routes
}
"""By keep-set source and sampling: the type of the routes."""


def serving_code(root: Path) -> SimpleNamespace:
    """The parts of vLLM between the engine's outputs and the JSON of the answer."""
    v = root / "vllm"
    pydantic_names = {name: getattr(pydantic, name) for name in ("BaseModel", "Field", "field_validator", "NonNegativeInt")}
    common = {
        "dataclass": dataclass,
        "field": field,
        "Any": Any,
        "Literal": Literal,
        "np": np,
        "NamedTuple": NamedTuple,
        "ClassVar": ClassVar,
    }
    outputs = execute(v / "outputs.py", ["SamplingMask", "WeightVersionSpan", "CompletionOutput"], common)
    engine = execute(v / "v1" / "outputs.py", ["SamplingMaskLists"], common)
    logprob = execute(v / "logprobs.py", ["Logprob"], common)
    known = common | pydantic_names | vars(outputs) | vars(logprob) | {"OpenAIBaseModel": pydantic.BaseModel}
    folder = v / "entrypoints" / "scale_out" / "token_in_token_out"
    classes = ["GenerateLogProb", "GenerateLogProbsContent", "GenerateLogProbs", "GenerateChoiceBase", "GenerateTokensChoice"]
    protocol = execute(folder / "protocol.py", [*classes, "GenerateResponseBase", "GenerateTokensResponse"], known)
    helpers = {
        **vars(execute(v / "utils" / "serial_utils.py", ["numpy2base64"], {"io": io, "np": np, "pybase64": base64})),
        **vars(execute(v / "utils" / "collection_utils.py", ["as_list"], {})),
        **vars(execute(v / "entrypoints" / "serve" / "engine" / "protocol.py", ["UsageInfo"], known)),
        "asyncio": asyncio, "time": time, "math": math, "itertools": itertools,
        "build_spec_decoding_metrics": lambda _: None, "clamp_prompt_logprobs": lambda given: given,
    }  # fmt: skip
    methods = ["_create_tokens_logprobs", "serve_tokens_full_generator", "_build_response_fields"]
    names = ["_clamp_logprob", *(f"ServingTokens.{name}" for name in methods)]
    serving = execute(folder / "serving.py", names, known | vars(protocol) | helpers)
    state = execute(
        v / "v1" / "engine" / "output_processor.py",
        ["RequestState.track_weight_version", "RequestState._weight_version_spans"],
        known,
    )
    return SimpleNamespace(**vars(outputs), **vars(engine), **vars(logprob), **vars(protocol), **vars(serving), **vars(state))


def make_answers(root: Path) -> dict[str, Any]:
    """By case: the JSON of an answer, without what changes from one call to the next."""
    code = serving_code(root)
    return {case: asyncio.run(_answer(code, case)) for case in CASES}


async def _answer(code: SimpleNamespace, case: str) -> dict[str, Any]:
    source, sampling = case.split(", ")
    truncated = sampling == "truncated"
    output = code.CompletionOutput(
        index=0, text="", token_ids=TOKENS, cumulative_logprob=None, finish_reason="length",
        logprobs=[_engine_logprobs(code, t, source, truncated) for t in range(len(TOKENS))],
        routed_experts=None if CASES[case] is None else _routes(CASES[case]),
        sampling_mask=_mask(code) if source == "native" and truncated else None,
        weight_versions=_spans(code),
    )  # fmt: skip
    final = MagicMock(
        outputs=[output], prompt_token_ids=PROMPT, encoder_prompt_token_ids=None, prompt_logprobs=None,
        prompt_token_id_logprobs=None, kv_transfer_params=None, ec_transfer_params=None,
    )  # fmt: skip
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(logprobs=0, n=1),
        output_mode="tokens",
        return_token_ids=None,
        _response_mm_placeholders=None,
    )
    server = SimpleNamespace(
        _logprobs_tokenizer=lambda text_mode: None, _raise_if_error=lambda reason, request_id: None, enable_log_outputs=False,
        request_logger=None, enable_prompt_tokens_details=False,
    )  # fmt: skip
    for method in ("_create_tokens_logprobs", "_build_response_fields"):
        setattr(server, method, getattr(code, method).__get__(server))

    async def results() -> Any:
        yield final

    known = {
        "self": server, "request": request, "result_generator": results(), "request_id": "a", "model_name": "m",
        "request_metadata": SimpleNamespace(),
    }  # fmt: skip
    wanted = [name for name, p in inspect.signature(code.serve_tokens_full_generator).parameters.items() if p.default is p.empty]
    response = await code.serve_tokens_full_generator(**{name: known[name] for name in wanted})
    return {"choices": response.model_dump(mode="json")["choices"]}


def _engine_logprobs(code: SimpleNamespace, t: int, source: str, truncated: bool) -> dict[int, Any]:
    """As the engine has them: the sampled token first, then the top ones in rank order, those left out at minus infinity."""
    kept = dict(zip(SETS[t], MASS[t], strict=True))
    ranked = sorted(kept, key=lambda token: -kept[token])
    entries = {TOKENS[t]: code.Logprob(math.log(kept[TOKENS[t]]), rank=1 + ranked.index(TOKENS[t]))}
    if source == "processed_logprobs" and truncated:
        entries |= {token: code.Logprob(math.log(kept[token]), rank=1 + n) for n, token in enumerate(ranked)}
        outside = [token for token in range(6) if token not in kept]
        entries |= {token: code.Logprob(-math.inf, rank=len(kept) + 1 + n) for n, token in enumerate(outside)}
    return entries


def _mask(code: SimpleNamespace) -> Any:
    offsets = np.cumsum([0, *(len(s) for s in SETS)])
    lists = code.SamplingMaskLists(np.array(list(itertools.chain.from_iterable(SETS))), offsets)
    return code.SamplingMask([row for t in range(len(SETS)) for row in lists.slice_request(t, 1).to_nested_list()])


def _spans(code: SimpleNamespace) -> Any:
    done = [0]
    state = SimpleNamespace(weight_version_starts=[], detokenizer=SimpleNamespace(num_output_tokens=lambda: done[0]))
    for version in VERSIONS:
        code.track_weight_version(state, version)
        done[0] += 1
    return code._weight_version_spans(state)


def _routes(dtype: np.dtype) -> np.ndarray:
    rows = len(PROMPT) + len(TOKENS) - 1
    routes = (np.arange(rows)[:, None, None] + np.arange(NUM_LAYERS)[:, None] * 2 + np.arange(3)) % CONTRACT.num_experts
    return routes.astype(dtype)


def what_does_not_decode(answers: Mapping[str, Any]) -> list[str]:
    """Each answer through the program's own client; what is not as it was sampled."""
    return [f"{case}: {problem}" for case, answer in answers.items() for problem in _problems(case, answer)]


def _problems(case: str, answer: Mapping[str, Any]) -> list[str]:
    source, sampling = case.split(", ")
    try:
        got = asyncio.run(_decoded(source, sampling, answer, dense=CASES[case] is None))
    except (ServerError, ValueError) as error:
        return [str(error)]
    truncated = sampling == "truncated"
    logprobs = [math.log(MASS[t][SETS[t].index(token)]) for t, token in enumerate(TOKENS)]
    routes = _routes(CASES[case])[:, list(CONTRACT.moe_layers)].tolist() if CASES[case] is not None else []
    found = {
        "token ids": (got.token_ids.tolist(), TOKENS),
        "log-probs": (got.logprobs.tolist(), np.float32(logprobs).tolist()),
        "keep-sets": ([sorted(row.tolist()) for row in got.keep_sets], SETS if truncated else [[]] * len(TOKENS)),
        "policy versions": (got.policy_versions.tolist(), [int(v) for v in VERSIONS]),
        "routes": (got.routed_experts.tolist(), routes),
    }
    return [f"{what} are {value}, sampled were {truth}" for what, (value, truth) in found.items() if value != truth]


async def _decoded(source: str, sampling: str, answer: Mapping[str, Any], *, dense: bool) -> Completion:
    client = client_over(httpx.MockTransport(lambda request: httpx.Response(200, json=answer)), source, dense=dense)
    try:
        return await client.generate(PROMPT, SAMPLINGS[sampling], "a")
    finally:
        await client.close()
