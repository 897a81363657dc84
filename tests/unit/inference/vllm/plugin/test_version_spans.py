"""The record of which version sampled which token, against a simulated engine. (The real one: tests/e2e/test_vllm_plugin.py.)"""

import itertools
import random

import pytest

from megatron_rl.inference.vllm.plugin.version_spans import VersionSpans, client_request_id


@pytest.mark.parametrize(
    ("engine_id", "client_id"),
    [
        ("generate-tokens-abc-0123abcd", "abc"),
        ("generate-tokens-a-b-0123abcd-89abcdef", "a-b-0123abcd"),
        ("2_generate-tokens-abc-0123abcd", "2_abc"),
        ("cmpl-abc-0123abcd", "abc"),
        ("chatcmpl-abc-0123abcd", "abc"),
        ("something else", "something else"),
    ],
)
def test_engine_id_to_client_id(engine_id, client_id):
    assert client_request_id(engine_id) == client_id


def test_spans_of_simulated_steps():
    """Random batches: requests wait, skip steps (preemption, prefill in chunks), get several tokens; the version goes up."""
    draw = random.Random(0)
    recorder = VersionSpans()
    names = {f"generate-tokens-r{i}-{i:08x}": f"r{i}" for i in range(20)}
    truth: dict[str, list[int]] = {name: [] for name in names.values()}
    for step in range(300):
        version = step // 40
        batch = draw.sample(sorted(names), draw.randrange(0, 12))
        sampled = [[7] * draw.choice((0, 0, 1, 1, 1, 3)) for _ in batch]
        recorder.record(batch, sampled, version)
        for engine_id, tokens in zip(batch, sampled, strict=True):
            truth[names[engine_id]] += [version] * len(tokens)
    answer = recorder.ask(truth)
    for name, versions in truth.items():
        spans = answer[name]
        ends = [start for start, _ in spans[1:]] + [len(versions)]
        assert [version for (start, version), end in zip(spans, ends, strict=True) for _ in range(start, end)] == versions
        assert all(left[1] != right[1] for left, right in itertools.pairwise(spans))


def test_asking_changes_nothing():
    recorder = VersionSpans()
    recorder.record(["generate-tokens-a-00000000"], [[1]], 3)
    assert recorder.ask(["a"]) == recorder.ask(["a"]) == {"a": [(0, 3)]}
    recorder.record(["generate-tokens-a-00000000"], [[1]], 4)
    recorder.finish(["generate-tokens-a-00000000"])
    assert recorder.ask(["a", "never seen"]) == recorder.ask(["a"]) == {"a": [(0, 3), (1, 4)]}


def test_only_finished_requests_are_forgotten_the_oldest_first():
    recorder = VersionSpans(max_finished=10)
    recorder.record(["generate-tokens-running-00000000"], [[1]], 0)
    for i in range(1000):
        recorder.record([f"generate-tokens-r{i}-{i:08x}"], [[1]], 0)
        recorder.finish([f"generate-tokens-r{i}-{i:08x}", "generate-tokens-without-a-token-00000000"])
    everybody = ["running", *(f"r{i}" for i in range(1000))]
    assert set(recorder.ask(everybody)) == {"running", *(f"r{i}" for i in range(990, 1000))}
    assert len(recorder._histories) == len(recorder._engine_ids) == 11


def test_an_id_used_twice_names_the_later_request():
    recorder = VersionSpans(max_finished=0)
    recorder.record(["generate-tokens-a-00000000"], [[1]], 3)
    recorder.record(["generate-tokens-a-11111111"], [[1]], 4)
    recorder.finish(["generate-tokens-a-00000000"])
    assert recorder.ask(["a"]) == {"a": [(0, 4)]}
