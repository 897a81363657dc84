"""Groups from prompt to payload file, and every way in which one fails."""

import asyncio
import json
import threading
import time

import numpy as np
import pytest
from starlette.responses import PlainTextResponse
from tokenizers import Tokenizer, decoders, models

from megatron_rl.config import Config
from megatron_rl.inference.registry import engine_of
from megatron_rl.records import GroupTask, Payload, check_rollout
from megatron_rl.rollouts.group import GroupSampler, all_or_first_error, in_daemon_thread
from megatron_rl.tasks import RewardError, TextEncoder, load_task
from tests.unit.inference.vllm.fake_vllm import CONTRACT, FakeVllm, running

CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    names = ["<pad>", "<eos>", "\n", *CHARACTERS, *(f"<unused{n}>" for n in range(47 - len(CHARACTERS)))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def make_sampler(tmp_path, model_folder, monkeypatch, *, rewards="", task=None, **rollouts) -> GroupSampler:
    """rewards: the text of a module with the functions reward and reply."""
    monkeypatch.chdir(tmp_path)
    name = f"rewards_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(rewards or "def reward(prompt, completion, item):\n    return len(completion) / 10\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    section = {"file": str(tmp_path / "data.jsonl"), "reward": f"{name}:reward", **(task or {})}
    if rollouts.get("max_turns", 1) > 1:
        section["environment"] = f"{name}:reply"
    config = Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "device": "cpu"},
            "model": {"path": str(model_folder), "max_sequence_length": 32},
            "task": section,
            "rollouts": {
                "max_new_tokens": 8,
                "max_keep_set": 16,
                "top_k": 16,
                "keep_set_source": "processed_logprobs",
                **rollouts,
            },
            "servers": {"request_timeout_s": 5.0},
        }
    )
    (tmp_path / "spool" / "rollouts").mkdir(parents=True)
    text = TextEncoder(model_folder, config.task)
    return GroupSampler(config, engine_of(config), CONTRACT, load_task(config.task, 0), text, tmp_path / "spool", "k")


def sample(sampler: GroupSampler, server: FakeVllm, num_samples: int = 4, **changes):
    async def body():
        try:
            task = GroupTask(
                **{"uid": "g5a1", "prompt_index": 5, "attempt": 1, "num_samples": num_samples, "server": server.url, **changes}
            )
            return await sampler.sample(task)
        finally:
            await sampler.close()

    return asyncio.run(body())


def test_a_whole_group(tmp_path, model_folder, monkeypatch):
    with running(FakeVllm()) as server:
        result = sample(make_sampler(tmp_path, model_folder, monkeypatch), server)
    assert result.failure is None and (result.uid, result.prompt_index, result.attempt) == ("g5a1", 5, 1)
    assert [r.uid for r in result.rollouts] == [f"g5a1.{k}" for k in range(4)]
    file = tmp_path / "spool" / "rollouts" / "g5a1.safetensors"
    assert result.payload_bytes == file.stat().st_size and result.seconds > 0
    payload = Payload(file)
    assert len(payload) == 4
    for summary in result.rollouts:
        rollout = payload.rollout(summary.index)
        check_rollout(rollout, CONTRACT)
        truth = server.truth[f"{summary.uid}.0"]
        assert summary.file == "rollouts/g5a1.safetensors" and rollout.uid == summary.uid
        assert (
            rollout.completion_ids.tolist() == truth["token_ids"] and (rollout.routed_experts == truth["routes"][:, [1, 3]]).all()
        )
        assert summary.reward == rollout.reward == len(sampler_text(model_folder).decode(rollout.completion_ids)) / 10
        assert (summary.num_prompt_tokens, summary.num_completion_tokens, summary.num_loss_tokens) == (4, 6, 6)
        assert summary.num_keep_ids == sum(map(len, truth["sets"])) and summary.num_with_keep_set == 6
        assert summary.num_singletons == sum(len(s) == 1 for s in truth["sets"]) and summary.num_with_routes == 9
        assert (summary.min_version, summary.max_version) == (0, 1)
    assert result.examples[0]["prompt"] == "1+1=" and result.examples[0]["reward"] == result.rollouts[0].reward


def sampler_text(model_folder):
    from megatron_rl.config.sections import Task

    return TextEncoder(model_folder, Task(name="chain_sum"))


def test_stop_tokens_are_the_end_of_sequence_and_the_newline(tmp_path, model_folder, monkeypatch):
    with running(FakeVllm()) as server:
        sample(make_sampler(tmp_path, model_folder, monkeypatch, stop_at_newline=True), server)
    assert all(r["sampling_params"]["stop_token_ids"] == [1, 2] for r in server.requests)


def test_two_turns_in_one_record(tmp_path, model_folder, monkeypatch):
    rewards = "def reward(p, c, i):\n    return 1.0\ndef reply(turns, item):\n    return 'ok?' if len(turns) == 2 else None\n"
    with running(FakeVllm(num_tokens=3)) as server:
        server.updates_in_flight = False
        result = sample(make_sampler(tmp_path, model_folder, monkeypatch, rewards=rewards, max_turns=2), server)
    assert result.failure is None
    rollout = Payload(tmp_path / "spool" / "rollouts" / "g5a1.safetensors").rollout(2)
    assert rollout.loss_mask.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert (
        result.rollouts[2].num_with_keep_set == result.rollouts[2].num_loss_tokens == 6
        and result.rollouts[2].num_with_routes == 12
    )


def repeat_an_expert(answer):
    choice = answer["choices"][0]
    import base64
    import io

    routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    routes[2, 3, 0] = routes[2, 3, 1]
    buffer = io.BytesIO()
    np.save(buffer, routes)
    choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
    return answer


@pytest.mark.parametrize(
    ("rewards", "script", "kind", "message", "num_sampled"),
    [
        ("", [lambda a: PlainTextResponse("boom", 500)], "server", "HTTP 500: boom", 0),
        ("", [lambda a: PlainTextResponse("ids out of vocabulary", 400)], "prompt", "HTTP 400: ids out of vocabulary", 0),
        ("", [repeat_an_expert], "contract", "twice in MoE layer 1; rule: a token goes to each of its experts once", 4),
        ("def reward(p, c, i):\n    return 1 / 0\n", [], "reward", "ZeroDivisionError", 4),
        ("def reward(p, c, i):\n    return 10**400\n", [], "reward", "OverflowError", 4),
        ("import numpy\ndef reward(p, c, i):\n    return numpy.ones(2)\n", [], "reward", "ValueError", 4),
        ("import sys\ndef reward(p, c, i):\n    sys.exit(3)\n", [], "reward", "the reward ended with SystemExit: 3", 4),
        ("def reward(p, c, i):\n    return float('nan')\n", [], "reward", "a reward must be a finite number", 4),
        ("import time\ndef reward(p, c, i):\n    time.sleep(30)\n", [], "reward", "the reward took more than 0.5 s", 4),
    ],
)
def test_failures_are_told_and_nothing_is_written(
    tmp_path, model_folder, monkeypatch, rewards, script, kind, message, num_sampled
):
    limits = {"timeout_s": 0.5 if "sleep" in rewards else 60}
    with running(FakeVllm()) as server:
        server.script = script
        result = sample(make_sampler(tmp_path, model_folder, monkeypatch, rewards=rewards, task=limits), server)
    assert result.failure == kind and message in result.message
    assert [r.num_completion_tokens for r in result.rollouts] == [6] * num_sampled  # lengths of what is thrown away
    assert all(r.file == "" for r in result.rollouts) and result.examples == () and result.payload_bytes == 0
    assert list((tmp_path / "spool" / "rollouts").iterdir()) == []


def test_a_prompt_that_is_too_long(tmp_path, model_folder, monkeypatch):
    sampler = make_sampler(tmp_path, model_folder, monkeypatch, task={"prompt_template": "0123456789" * 3 + "{prompt}"})
    with running(FakeVllm()) as server:
        result = sample(sampler, server)
    assert (
        result.failure == "prompt"
        and "34 tokens, which with rollouts.max_new_tokens = 8" in result.message
        and not server.requests
    )


def test_first_error_cancels_the_rest():
    cancelled = []

    async def slow(n):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(n)
            raise

    async def fails():
        await asyncio.sleep(0.01)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(all_or_first_error([slow(0), fails(), slow(2)]))
    assert sorted(cancelled) == [0, 2]


def test_a_hanging_function_blocks_nothing():
    release = threading.Event()

    async def body():
        started = time.monotonic()
        with pytest.raises(RewardError, match="it took more than 0.2 s"):
            await in_daemon_thread(release.wait, 0.2, "it")
        return time.monotonic() - started

    assert asyncio.run(body()) < 20
    release.set()
