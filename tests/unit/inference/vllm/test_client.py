"""The client against a server that answers with vLLM's JSON; decoding to the bit, and every way to fail as a typed error."""

import asyncio
import base64
import io
import pickle
import socket
from itertools import chain

import numpy as np
import pytest
from starlette.responses import PlainTextResponse

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.vllm.client import VllmClient
from megatron_rl.records import ContractError, Rollout, Sampling, check_rollout
from tests.unit.inference.vllm.fake_vllm import CONTRACT, FakeVllm, running

TOP_P = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=9)


def generate(server: FakeVllm, *, sampling=TOP_P, request_ids=("a",), timeout_s=5.0, max_keep_set=16, prompt=(3, 1, 4)):
    """The completions of these requests, sent at once; an exception stands for itself."""

    async def body():
        client = VllmClient(
            server.url, CONTRACT, key="k", keep_set_source=server.source, max_keep_set=max_keep_set, timeout_s=timeout_s
        )
        asked = [client.generate(np.array(prompt), sampling, request_id, stop_token_ids=(7, 8)) for request_id in request_ids]
        try:
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(body())


def as_rollout(completion: Completion, sampling: Sampling, prompt=(3, 1, 4)) -> Rollout:
    count = len(completion.token_ids)
    parts = {name: getattr(completion, name) for name in ("logprobs", "keep_sets", "routed_experts", "policy_versions")}
    return Rollout(
        uid="a",
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=completion.token_ids,
        loss_mask=np.ones(count, dtype=bool),
        sampling=sampling,
        finish_reason=completion.finish_reason,
        reward=0.0,
        **parts,
    )


@pytest.mark.parametrize("integer_ids", [False, True], ids=["0.30", "0.33"])
@pytest.mark.parametrize("source", ["processed_logprobs", "native"])
def test_everything_arrives_as_it_was_sampled(source, integer_ids):
    with running(FakeVllm(keep_set_source=source, integer_ids=integer_ids)) as server:
        (got,) = generate(server)
    truth = server.truth["a"]
    assert got.token_ids.tolist() == truth["token_ids"]
    assert got.logprobs.tolist() == np.float32(truth["logprobs"]).tolist()
    sets = [set(kept.tolist()) for kept in got.keep_sets]
    assert sets == [set(s) for s in truth["sets"]]
    assert (got.routed_experts == truth["routes"][:, [1, 3]]).all() and got.routed_experts.dtype == np.uint8
    assert got.policy_versions.tolist() == [0, 0, 0, 1, 1, 1]
    assert got.routed_experts.shape == (3 + 6 - 1, 2, 3)
    check_rollout(as_rollout(got, TOP_P), CONTRACT)


@pytest.mark.parametrize(
    ("source", "sampling", "expected"),
    [
        ("processed_logprobs", TOP_P, {"top_k": 0, "logprobs": 16, "temperature": 0.7, "top_p": 0.9, "max_tokens": 9}),
        ("native", TOP_P, {"top_k": 50, "logprobs": 0}),  # no limit, said as the vocabulary's size
        ("native", Sampling(top_p=0.9, top_k=5), {"top_k": 5, "logprobs": 0}),
        ("native", Sampling(), {"top_k": 0, "logprobs": 0}),  # a server without the mask, which wants no limit
        ("processed_logprobs", Sampling(), {"top_k": 0, "logprobs": 0, "top_p": 1.0}),
        ("processed_logprobs", Sampling(top_k=1), {"top_k": 1, "logprobs": 16}),
    ],
)
def test_what_is_asked(source, sampling, expected):
    with running(FakeVllm(keep_set_source=source)) as server:
        generate(server, sampling=sampling)
    (request,) = server.requests
    asked = request["sampling_params"]
    assert expected.items() <= asked.items() and asked["stop_token_ids"] == [7, 8] and asked["n"] == 1
    assert "seed" not in asked and "stream" not in request
    assert request["token_ids"] == [3, 1, 4] and request["request_id"] == "a"


def test_untruncated_sampling_has_no_sets():
    sampling = Sampling()
    with running(FakeVllm()) as server:
        (got,) = generate(server, sampling=sampling)
    assert len(got.keep_sets.ids) == 0 and got.keep_sets.offsets.tolist() == [0] * 7
    check_rollout(as_rollout(got, sampling), CONTRACT)


def test_requests_that_end_together_ask_for_their_versions_together():
    names = [f"g{n}.0" for n in range(40)]
    with running(FakeVllm()) as server:
        completions = generate(server, request_ids=names)
    assert [c.token_ids.tolist() for c in completions] == [server.truth[name]["token_ids"] for name in names]
    assert sorted(chain.from_iterable(server.span_questions)) == sorted(names)
    assert len(server.span_questions) < len(names)


def change(**fields):
    """Replace fields of the one choice."""
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **fields}]}


def cut_a_set(answer):
    """As when the set is wider than the log-probs asked for: the last kept entry is gone."""
    for token in answer["choices"][0]["logprobs"]["content"]:
        kept = [e for e in token["top_logprobs"] if e["logprob"] > -9999]
        if len(kept) > 1:
            token["top_logprobs"] = kept[:-1]
            return answer
    raise AssertionError("no set to cut")


def encoded(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (cut_a_set, "the keep-set has all of the probability mass"),
        (change(routed_experts=None), "--enable-return-routed-experts"),
        (change(routed_experts="AAAA"), "routes are a base64 .npy"),
        (change(routed_experts=encoded(np.zeros((8, 3, 3), dtype=np.uint8))), "more than 3 layers"),
        (change(routed_experts=encoded(np.array([{"a": 1}], dtype=object))), "routes that cannot be read"),
        (change(token_ids=[1, 2, 3]), "a log-prob for each sampled token"),
        (change(token_ids=[0] * 6), "a log-prob for each sampled token, in order"),
    ],
)
def test_answers_that_break_the_contract(script, message):
    with running(FakeVllm()) as server:
        server.script = [script]
        (error,) = generate(server)
    assert isinstance(error, ContractError) and message in str(error) and error.rollout == "a"


def test_a_missing_native_mask_is_never_taken_for_the_whole_vocabulary():
    with running(FakeVllm(keep_set_source="native")) as server:
        server.script = [change(sampling_mask=None)]
        (error,) = generate(server)
    assert isinstance(error, ContractError) and "--return-sampling-mask" in str(error)


def test_an_engine_that_stamps_its_tokens_itself_is_not_asked():
    """vLLM 0.33's own spans, and its int32 routes."""
    stamped = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 6}]
    with running(FakeVllm()) as server:
        server.script = [lambda answer: change(weight_versions=stamped, routed_experts=widened(answer))(answer)]
        (got,) = generate(server)
    assert got.policy_versions.tolist() == [4, 4, 5, 5, 5, 5]
    assert got.routed_experts.dtype == np.uint16
    assert (got.routed_experts == server.truth["a"]["routes"][:, [1, 3]]).all()


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "4", "start": 0, "end": 5}],
        [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 3, "end": 6}],
        [{"version": "default", "start": 0, "end": 6}],
        [{"version": "4", "start": 0}],
    ],
    ids=["too short", "a gap", "before the first update", "another shape"],
)
def test_own_spans_that_do_not_cover_the_tokens(spans):
    with running(FakeVllm()) as server:
        server.script = [change(weight_versions=spans)]
        (error,) = generate(server)
    assert isinstance(error, ServerError) and "version spans" in str(error)


def widened(answer):
    routes = np.load(io.BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))
    return encoded(routes.astype(np.int32))


@pytest.mark.parametrize("spans", [[], [[1, 0]], [[0, 0], [0, 1]], [[0, 0], [6, 1]], [[0, 0], [4, 1], [2, 2]]])
def test_version_spans_that_do_not_fit(spans):
    server = FakeVllm()
    sample = server.sample
    server.sample = lambda request: {**sample(request), "spans": spans}
    with running(server):
        (error,) = generate(server)
    assert isinstance(error, ContractError) and "version spans" in str(error)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda a: PlainTextResponse("engine died", 500), "HTTP 500: engine died"),
        (lambda a: {"error": {"message": "EngineCore encountered an issue"}}, "an error inside a 200"),
        (lambda a: PlainTextResponse("<html>"), "no JSON in '<html>'"),
        (lambda a: {"choices": []}, "not one finished choice"),
        (change(finish_reason="abort"), "'finish_reason': 'abort'"),
        (change(logprobs={"entries": []}), "unexpected shape"),
    ],
)
def test_server_errors_are_typed(script, message):
    with running(FakeVllm()) as server:
        server.script = [script]
        (error,) = generate(server)
    assert isinstance(error, ServerError) and message in str(error) and error.server == server.url
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_request_unknown_to_the_version_spans_fails_alone():
    with running(FakeVllm()) as server:
        server.script = [lambda answer: server.truth.pop("a") and answer]
        lost, whole = generate(server, request_ids=("a", "b"))
    if isinstance(whole, ServerError):  # the server may have answered b first
        lost, whole = whole, lost
    assert isinstance(lost, (ServerError, Completion)) and isinstance(whole, (ServerError, Completion))
    assert sum(isinstance(c, ServerError) for c in (lost, whole)) == 1


def test_hanging_and_dead_servers():
    with running(FakeVllm()) as server:
        server.delay_s = 3.0
        (hanging,) = generate(server, timeout_s=0.3)
    assert isinstance(hanging, ServerError) and "no answer within 0.3 s" in str(hanging)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server.url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    (dead,) = generate(server)
    assert isinstance(dead, ServerError) and "ConnectError" in str(dead)
