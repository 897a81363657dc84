"""Episodes of one and more turns: every token's routes, set, version and mask stand where the token stands."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.errors import PromptError
from megatron_rl.records import ModelContract, RaggedIds, Sampling, check_rollout
from megatron_rl.rollouts.episode import EpisodeRules, run_episode

CONTRACT = ModelContract(vocab_size=200, moe_layers=(0, 1), num_experts=16, experts_per_token=3)
RULES = EpisodeRules(Sampling(top_p=0.9, max_new_tokens=5), stop_token_ids=(9,), max_sequence_length=100, max_turns=3)


class Letters:
    """Token 100 + n is the n-th letter."""

    def continuation(self, text):
        return tuple(100 + ord(c) - ord("a") for c in text)

    def decode(self, ids):
        return "".join(chr(int(i) - 100 + ord("a")) for i in ids)

    whole_text = decode


class Scripted:
    """Turn n has lengths[n] tokens of version versions[n]. A request's routes depend on position and turn: a row tells both."""

    def __init__(self, lengths, versions, finish="stop"):
        self.lengths, self.versions, self.finish, self.asked = lengths, versions, finish, []

    async def generate(self, prompt_ids, sampling, request_id, stop_token_ids=()):
        turn = len(self.asked)
        self.asked.append((list(prompt_ids), sampling, request_id, tuple(stop_token_ids)))
        count = min(self.lengths[turn], sampling.max_new_tokens)
        ids = np.arange(100 + 10 * turn, 100 + 10 * turn + count, dtype=np.int32)
        sets = [[int(i), *range(50, 50 + n % 3)] for n, i in enumerate(ids)]
        return Completion(
            token_ids=ids,
            logprobs=np.linspace(-0.1, -0.9, count).astype(np.float32) - turn,
            keep_sets=RaggedIds.of(sets),
            routed_experts=routes(len(prompt_ids) + count - 1, turn),
            policy_versions=np.full(count, self.versions[turn], dtype=np.int32),
            finish_reason=self.finish,
        )


def routes(rows, turn):
    """Row i of turn n: experts that encode i modulo 5 and n."""
    row = np.arange(rows) % 5
    first = np.stack([row, row + 5, np.full(rows, 10 + turn)], axis=-1)
    return np.stack([first, first[:, ::-1]], axis=1).astype(np.uint8)


def episode(policy, *, prompt_ids=(1, 2, 3), rules=RULES, replies=()):
    replies, seen = list(replies), []

    async def reply(turns, token_ids):
        assert Letters().decode(token_ids) == turns[-1]["content"]
        seen.append([dict(turn) for turn in turns])
        return replies.pop(0) if replies else None

    rollout = asyncio.run(run_episode("g1a0.2", "prompt", prompt_ids, policy, Letters(), rules, reply))
    check_rollout(rollout, CONTRACT)
    return rollout, seen


def test_single_turn():
    policy = Scripted([4], [7])
    rollout, seen = episode(policy)
    assert policy.asked == [([1, 2, 3], RULES.sampling, "g1a0.2.0", (9,))]
    assert rollout.prompt_ids.tolist() == [1, 2, 3] and rollout.completion_ids.tolist() == [100, 101, 102, 103]
    assert rollout.loss_mask.all() and rollout.policy_versions.tolist() == [7] * 4 and rollout.finish_reason == "stop"
    assert (rollout.routed_experts == routes(6, 0)).all()
    assert seen == [[{"role": "user", "content": "prompt"}, {"role": "assistant", "content": "abcd"}]]


def test_tool_tokens_carry_no_set_and_no_loss_and_shift_nothing():
    policy = Scripted([4, 3, 2], [7, 7, 9])
    rollout, seen = episode(policy, replies=["xy", "z"])
    x, y, z = Letters().continuation("xyz")
    assert [ids for ids, *_ in policy.asked] == [
        [1, 2, 3],
        [1, 2, 3, 100, 101, 102, 103, x, y],
        [1, 2, 3, 100, 101, 102, 103, x, y, 110, 111, 112, z],
    ]
    assert [name for _, _, name, _ in policy.asked] == ["g1a0.2.0", "g1a0.2.1", "g1a0.2.2"]
    assert rollout.completion_ids.tolist() == [100, 101, 102, 103, x, y, 110, 111, 112, z, 120, 121]
    assert rollout.loss_mask.astype(int).tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1]
    assert rollout.policy_versions.tolist() == [7] * 9 + [9] * 3  # z was read by the third turn
    assert rollout.set_sizes.tolist() == [1, 2, 3, 1, 0, 0, 1, 2, 3, 0, 1, 2]
    firsts = rollout.keep_sets.ids[rollout.keep_sets.offsets[:-1][rollout.loss_mask]]
    assert firsts.tolist() == rollout.completion_ids[rollout.loss_mask].tolist()
    assert (rollout.logprobs[~rollout.loss_mask] == 0).all()
    assert rollout.logprobs[[0, 3, 6, 10]].tolist() == np.float32([-0.1, -0.9, -1.1, -2.1]).tolist()
    assert [turn["role"] for turn in seen[-1]] == ["user", "assistant", "tool", "assistant"]


def test_each_row_of_routes_is_of_the_request_that_sampled_there():
    """Turn 1: rows 0..5 (3 + 4 - 1). Its last token and what follows up to the end of turn 2: rows 6..10, and so on."""
    rollout, _ = episode(Scripted([4, 3, 2], [7, 7, 9]), replies=["xy", "z"])
    turn_of_row = rollout.routed_experts[:, 0, 2] - 10
    assert turn_of_row.tolist() == [0] * 6 + [1] * 5 + [2] * 3
    assert (rollout.routed_experts[:, 0, 0] == np.arange(14) % 5).all()


def test_the_last_turn_is_not_answered():
    rollout, seen = episode(Scripted([1, 1, 1], [0, 0, 0]), replies=["a", "b", "never"])
    assert len(seen) == 2 and rollout.completion_ids.tolist() == [100, 100, 110, 101, 120]


def test_a_reply_that_leaves_no_room_ends_the_episode():
    rules = EpisodeRules(RULES.sampling, (9,), max_sequence_length=10, max_turns=3)
    rollout, _ = episode(Scripted([4], [1]), rules=rules, replies=["abc"])
    assert rollout.completion_ids.tolist() == [100, 101, 102, 103] and rollout.finish_reason == "length"


def test_a_later_turn_is_cut_to_the_room_that_is_left():
    rules = EpisodeRules(RULES.sampling, (9,), max_sequence_length=11, max_turns=3)
    policy = Scripted([4, 5], [1, 1], finish="length")
    rollout, _ = episode(policy, rules=rules, replies=["ab"])
    assert policy.asked[1][1].max_new_tokens == 2
    assert rollout.num_tokens == 11 and rollout.finish_reason == "length"
    assert rollout.sampling == RULES.sampling


def test_an_empty_reply_is_a_reply():
    rollout, _ = episode(Scripted([2, 2], [1, 2]), replies=[""])
    assert rollout.completion_ids.tolist() == [100, 101, 110, 111] and rollout.loss_mask.all()


@pytest.mark.parametrize(
    ("prompt_ids", "message"), [((), "the prompt is empty"), (range(96), "96 tokens, which with rollouts.max_new_tokens = 5")]
)
def test_prompts_that_cannot_be_sampled(prompt_ids, message):
    with pytest.raises(PromptError, match=message):
        episode(Scripted([1], [0]), prompt_ids=tuple(prompt_ids))


class Typed(Scripted):
    """Samples the letters of `texts`, one text a request, and stops at a token that it is told to stop at, as servers do."""

    def __init__(self, *texts):
        super().__init__([len(text) for text in texts], range(1, 1 + len(texts)))
        self.texts = texts

    async def generate(self, prompt_ids, sampling, request_id, stop_token_ids=()):
        text = self.texts[len(self.asked)]
        ids = np.array(Letters().continuation(text), dtype=np.int32)[: sampling.max_new_tokens]
        ends = [n for n, i in enumerate(ids) if int(i) in stop_token_ids]
        ids = ids[: ends[0] + 1] if ends else ids
        done = await super().generate(prompt_ids, sampling, request_id, stop_token_ids)
        count = len(ids)
        return Completion(
            token_ids=ids,
            logprobs=np.full(count, -0.5 - len(self.asked), dtype=np.float32),
            keep_sets=RaggedIds.of([[int(i), 50 + len(self.asked)] for i in ids]),
            routed_experts=routes(len(prompt_ids) + count - 1, len(self.asked) - 1),
            policy_versions=np.full(count, done.policy_versions[0] if len(done.policy_versions) else 0, dtype=np.int32),
            finish_reason="stop" if ends else "length",
        )


STOPS = EpisodeRules(
    Sampling(top_p=0.9, max_new_tokens=9),
    (9,),
    max_sequence_length=100,
    stop=("end",),
    may_complete_stop=Letters().continuation("d"),
)


def test_a_stop_string_ends_a_turn_and_what_was_sampled_up_to_it_is_one_record():
    """Two requests: the first ends at a d that completes nothing. Records that belong to a token stay with it."""
    policy = Typed("abd", "xendyy")
    rollout, _ = episode(policy, rules=STOPS)
    assert Letters().decode(rollout.completion_ids) == "abdxend" and rollout.finish_reason == "stop"
    assert [name for _, _, name, _ in policy.asked] == ["g1a0.2.0", "g1a0.2.0+"]
    assert [sampling.max_new_tokens for _, sampling, *_ in policy.asked] == [9, 6]
    assert policy.asked[1][0] == [1, 2, 3, *Letters().continuation("abd")] and policy.asked[0][3] == (9, *STOPS.may_complete_stop)
    assert rollout.policy_versions.tolist() == [1] * 3 + [2] * 4
    assert rollout.keep_sets.ids.reshape(-1, 2)[:, 1].tolist() == [51] * 3 + [52] * 4
    assert rollout.logprobs.tolist() == [-1.5] * 3 + [-2.5] * 4
    assert (rollout.routed_experts[:, 0, 2] - 10).tolist() == [0] * 5 + [1] * 4


@pytest.mark.parametrize(
    ("texts", "expected", "reason"),
    [
        (("abcabcabcabc",), "abcabcabc", "length"),
        (("dddd", "abd", "dd", "abcd"), "dabddabcd", "length"),  # each asks again
        (("abcabcend",), "abcabcend", "stop"),  # completed by the last token that there is room for
        (("en", ), "en", "length"),
    ],
)  # fmt: skip
def test_a_turn_without_a_stop_string_ends_at_its_limit(texts, expected, reason):
    rules = replace(STOPS, sampling=replace(STOPS.sampling, max_new_tokens=min(9, len(expected))))
    rollout, _ = episode(Typed(*texts), rules=rules)
    assert (Letters().decode(rollout.completion_ids), rollout.finish_reason) == (expected, reason)


def test_a_stop_string_of_an_earlier_turn_ends_none():
    rollout, _ = episode(Typed("end", "d", "end"), rules=replace(STOPS, max_turns=2), replies=["en"])
    assert (
        Letters().decode(rollout.completion_ids) == "endendend"
        and rollout.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 4
    )
