"""One episode: the policy's turn, the environment's answer, the next turn, as one record over one token sequence.

    ids       | prompt ........ | turn 1 ...... | reply .... | turn 2 ...... |
    loss_mask |                 | 1 1 1 1 1 1 1 | 0 0 0 0 0  | 1 1 1 1 1 1 1 |
    keep-sets |                 | its own       | empty      | its own       |
    routes    | --- those of turn 1's request --|--- turn 2's request -----| (all but the very last token)

Each turn's request has the complete sequence so far as its prompt, and its routes cover it. A row is taken from the first request
that has it: the recorded log-probs were computed with these experts, also where the weights have changed since.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from megatron_rl.inference.completion import Completion
from megatron_rl.inference.engine import SamplingClient
from megatron_rl.inference.errors import PromptError
from megatron_rl.records import RaggedIds, Rollout, Sampling

Reply = Callable[[list[dict[str, str]], list[int]], Awaitable[str | None]]
"""The environment's answer to the turns so far ({role, content}, the prompt first) and the ids of the last; None ends the
episode."""


class Codec(Protocol):
    """Text to tokens and back, as `tasks.TextEncoder` does it."""

    def continuation(self, text: str) -> tuple[int, ...]:
        """Token ids of an environment's answer, as it follows a turn of the policy."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a turn."""
        ...

    def whole_text(self, ids: Sequence[int]) -> str:
        """The text of some ids with all special tokens, in which stop strings are looked for."""
        ...


@dataclass(frozen=True)
class EpisodeRules:
    """What holds for all episodes of a run."""

    sampling: Sampling
    """How each turn is sampled; max_new_tokens is that of one turn."""
    stop_token_ids: tuple[int, ...]
    max_sequence_length: int
    max_turns: int = 1
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""
    may_complete_stop: tuple[int, ...] = ()
    """Tokens with which a text of `stop` can come to its end: the server hands over after each, and is asked to go on if it did
    not."""


@dataclass
class _Sequence:
    """Grows turn by turn; every list holds one array a segment (a turn of the policy, or a reply)."""

    prompt_ids: np.ndarray
    completion_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    keep_sets: list[RaggedIds] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    loss_mask: list[np.ndarray] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, *self.completion_ids])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.completion_ids))

    def add_turn(self, turn: Completion) -> None:
        num_rows = sum(map(len, self.routes))
        self.routes.append(turn.routed_experts[num_rows:])
        self._add(turn.token_ids, turn.logprobs, turn.keep_sets, turn.policy_versions, is_loss=True)

    def add_reply(self, ids: Sequence[int], version: int) -> None:
        """version: that of the turn that reads it."""
        count = len(ids)
        no_sets = RaggedIds.empty(count)
        self._add(np.array(ids, dtype=np.int32), np.zeros(count), no_sets, np.full(count, version), is_loss=False)

    def _add(self, ids: np.ndarray, logprobs: np.ndarray, keep_sets: RaggedIds, versions: np.ndarray, *, is_loss: bool) -> None:
        self.completion_ids.append(ids)
        self.logprobs.append(logprobs)
        self.keep_sets.append(keep_sets)
        self.versions.append(versions)
        self.loss_mask.append(np.full(len(ids), is_loss))

    def as_rollout(self, uid: str, sampling: Sampling, finish_reason: str) -> Rollout:
        return Rollout(
            uid=uid,
            prompt_ids=self.prompt_ids,
            completion_ids=np.concatenate(self.completion_ids),
            logprobs=np.concatenate(self.logprobs).astype(np.float32),
            keep_sets=RaggedIds.concatenate(self.keep_sets),
            routed_experts=np.concatenate(self.routes),
            policy_versions=np.concatenate(self.versions).astype(np.int32),
            loss_mask=np.concatenate(self.loss_mask),
            sampling=sampling,
            finish_reason=finish_reason,
            reward=0.0,
        )


async def run_episode(
    uid: str,
    prompt: str,
    prompt_ids: Sequence[int],
    policy: SamplingClient,
    codec: Codec,
    rules: EpisodeRules,
    reply: Reply | None = None,
) -> Rollout:
    """Sample an episode.

    It ends when the environment does not answer, after max_turns, or when another turn does not fit into max_sequence_length
    (finish reason 'length').

    Args:
        uid: The rollout's; `uid.0`, `uid.1`, ... are the ids of its requests, and `uid.0+` that of a turn which goes on.
        prompt: Text, for the environment.
        prompt_ids: Token ids, [num_prompt_tokens].
        policy: The server that samples.
        codec: Text to tokens and back.
        rules: The run's.
        reply: The environment; None for a single turn.

    Returns:
        The record, with reward 0.

    Raises:
        PromptError: The prompt is empty, or leaves no room for max_new_tokens.
        ServerError: The server failed.
        ContractError: An answer is not a complete record.
    """
    sequence = _Sequence(np.array(prompt_ids, dtype=np.int32))
    _check_room(len(prompt_ids), rules)
    turns = [{"role": "user", "content": prompt}]
    pending: tuple[int, ...] = ()  # a reply that no turn has read yet
    for turn in range(rules.max_turns):
        room = rules.max_sequence_length - sequence.num_tokens - len(pending)
        if room < 1:
            return sequence.as_rollout(uid, rules.sampling, "length")
        limit = min(rules.sampling.max_new_tokens, room)
        token_ids, finish_reason = await _sample_turn(f"{uid}.{turn}", sequence, pending, limit, policy, codec, rules)
        turns.append({"role": "assistant", "content": codec.decode(token_ids)})
        answer = await reply(turns, token_ids) if reply and turn + 1 < rules.max_turns else None
        if answer is None:
            break
        turns.append({"role": "tool", "content": answer})
        pending = codec.continuation(answer)
    return sequence.as_rollout(uid, rules.sampling, finish_reason)


async def _sample_turn(
    uid: str, sequence: _Sequence, pending: Sequence[int], limit: int, policy: SamplingClient, codec: Codec, rules: EpisodeRules
) -> tuple[list[int], str]:
    """One turn of at most `limit` tokens, added to the sequence after the reply that it reads.

    Servers know no text, only tokens. So with stop strings a turn may take several requests: each ends at a token that may
    complete one, and the next goes on where none is complete. What they sampled is one turn, as the replies of several turns are
    one sequence.

    Returns:
        The ids of the turn, and its finish reason.
    """
    token_ids: list[int] = []
    while True:
        sampling = replace(rules.sampling, max_new_tokens=limit - len(token_ids))
        stops = tuple(dict.fromkeys(rules.stop_token_ids + rules.may_complete_stop))
        completion = await policy.generate([*sequence.ids, *pending], sampling, uid, stops)
        if pending:
            sequence.add_reply(pending, int(completion.policy_versions[0]))
        sequence.add_turn(completion)
        token_ids += completion.token_ids.tolist()
        is_stopped = token_ids[-1] in rules.stop_token_ids or _has_stop(token_ids, codec, rules.stop)
        if not rules.stop or (completion.finish_reason == "length" and not is_stopped):
            return token_ids, completion.finish_reason
        if is_stopped or len(token_ids) == limit:
            return token_ids, "stop" if is_stopped else "length"
        pending, uid = (), f"{uid}+"  # unique among requests


def _has_stop(token_ids: Sequence[int], codec: Codec, stop: Sequence[str]) -> bool:
    """Whether the last token completed one. A token has at least one byte, so the last ones are enough to look into."""
    num_last = max((len(text.encode()) for text in stop), default=0) + 8
    return any(text in codec.whole_text(token_ids[-num_last:]) for text in stop)


def _check_room(num_prompt_tokens: int, rules: EpisodeRules) -> None:
    wanted = rules.sampling.max_new_tokens
    if num_prompt_tokens < 1:
        raise PromptError("the prompt is empty; a prompt has at least one token")
    if num_prompt_tokens + wanted > rules.max_sequence_length:
        raise PromptError(
            f"the prompt has {num_prompt_tokens} tokens, which with rollouts.max_new_tokens = {wanted} exceeds "
            f"model.max_sequence_length = {rules.max_sequence_length}; raise it, or leave such prompts out"
        )
