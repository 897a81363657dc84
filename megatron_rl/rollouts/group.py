"""One group: a prompt sampled several times, scored, checked, written into the spool, and summarised for the orchestrator."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np

from megatron_rl.config import Config
from megatron_rl.config.sections import Rollouts as RolloutsSection
from megatron_rl.inference.engine import InferenceEngine, SamplingClient
from megatron_rl.inference.errors import PromptError, ServerError
from megatron_rl.records import (
    ContractError,
    GroupResult,
    GroupTask,
    ModelContract,
    Rollout,
    RolloutSummary,
    check_rollout,
    write_payload,
)
from megatron_rl.rollouts.episode import EpisodeRules, run_episode
from megatron_rl.tasks import RewardError, Task, TaskError, TextEncoder

T = TypeVar("T")

_FAILURES: dict[type[Exception], str] = {
    ContractError: "contract",
    RewardError: "reward",
    ServerError: "server",
    PromptError: "prompt",
    TaskError: "prompt",
}
"""Errors that fail one group only; any other error is a bug of this program and ends the worker."""


class GroupSampler:
    """Turns group tasks into results.

    Args:
        config: The run's.
        engine: The one that `config` names.
        contract: What the records of the model look like.
        task: Gives prompts and scores completions.
        text: The tokenizer.
        spool: RUN/spool, which has the folder `rollouts`.
        key: The run's.
    """

    def __init__(
        self,
        config: Config,
        engine: InferenceEngine,
        contract: ModelContract,
        task: Task,
        text: TextEncoder,
        spool: Path,
        key: str,
    ) -> None:
        r = config.rollouts
        self._engine = engine
        self._config, self._contract, self._task, self._text, self._spool = config, contract, task, text, spool
        may_complete_stop = {i for stop in r.stop for i in text.ids_that_may_complete(stop)}
        self._rules = EpisodeRules(
            sampling=config.sampling,
            stop_token_ids=stop_ids_of(text, r),
            max_sequence_length=config.model.max_sequence_length,
            max_turns=r.max_turns,
            stop=r.stop,
            may_complete_stop=tuple(sorted(may_complete_stop)),
        )
        self._key = key
        self._clients: dict[str, SamplingClient] = {}

    async def sample(self, group: GroupTask) -> GroupResult:
        """Sample and score one group.

        Returns:
            Its summary; where an error of _FAILURES occurred, the kind of failure and the lengths of the rollouts, if any.
        """
        started = time.monotonic()
        result = GroupResult(uid=group.uid, prompt_index=group.prompt_index, attempt=group.attempt, server=group.server)
        rollouts: list[Rollout] = []
        try:
            rollouts = await self._episodes(group)
            rollouts = await self._scored(group, rollouts)
            for rollout in rollouts:
                check_rollout(rollout, self._contract)
            file = f"rollouts/{group.uid}.safetensors"
            num_bytes = await asyncio.to_thread(write_payload, self._spool / file, rollouts)
            result = replace(result, payload_bytes=num_bytes, examples=(self._example(group, rollouts[0]),))
        except tuple(_FAILURES) as error:
            file, kind = "", next(kind for of, kind in _FAILURES.items() if isinstance(error, of))
            result = replace(result, failure=kind, message=str(error))
        summaries = tuple(summary_of(r, file, i, self._contract) for i, r in enumerate(rollouts))
        return replace(result, rollouts=summaries, seconds=time.monotonic() - started)

    async def close(self) -> None:
        """Close the clients of all servers."""
        for client in self._clients.values():
            await client.close()

    async def _episodes(self, group: GroupTask) -> list[Rollout]:
        prompt = self._task.prompt(group.prompt_index)
        prompt_ids, policy = self._text.prompt(prompt), self._client(group.server)

        async def reply(turns: list[dict[str, str]], token_ids: list[int]) -> str | None:
            return await in_daemon_thread(
                lambda: self._task.reply(group.prompt_index, turns, token_ids), self._config.task.timeout_s, "the environment"
            )

        answer = reply if self._rules.max_turns > 1 else None
        uids = [f"{group.uid}.{k}" for k in range(group.num_samples)]
        return await all_or_first_error(
            [run_episode(uid, prompt, prompt_ids, policy, self._text, self._rules, answer) for uid in uids]
        )

    async def _scored(self, group: GroupTask, rollouts: Sequence[Rollout]) -> list[Rollout]:
        def score_all() -> list[float]:
            completions = [r.completion_ids.tolist() for r in rollouts]
            return [self._task.score(group.prompt_index, self._text.decode(ids), ids) for ids in completions]

        rewards = await in_daemon_thread(score_all, self._config.task.timeout_s, "the reward")
        return [replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]

    def _client(self, url: str) -> SamplingClient:
        if url not in self._clients:
            self._clients[url] = self._engine.sampling_client(
                url,
                self._contract,
                key=self._key,
                keep_set_source=self._config.keep_set_source,
                max_keep_set=self._config.rollouts.max_keep_set,
                timeout_s=self._config.servers.request_timeout_s,
            )
        return self._clients[url]

    def _example(self, group: GroupTask, rollout: Rollout) -> dict[str, Any]:
        return {
            "uid": rollout.uid,
            "prompt": self._task.prompt(group.prompt_index),
            "completion": self._text.decode(rollout.completion_ids.tolist()),
            "reward": rollout.reward,
            "finish_reason": rollout.finish_reason,
        }


def stop_ids_of(text: TextEncoder, rollouts: RolloutsSection) -> tuple[int, ...]:
    """The tokens that end a completion.

    Raises:
        TaskError: rollouts.stop_tokens has what is no token.
    """
    newlines = text.newline_ids if rollouts.stop_at_newline else ()
    return tuple(dict.fromkeys(text.eos_ids + text.stop_ids(rollouts.stop_tokens) + newlines))


def summary_of(rollout: Rollout, file: str, index: int, contract: ModelContract) -> RolloutSummary:
    """What the orchestrator learns of a rollout.

    Args:
        rollout: The record.
        file: Path of its payload, relative to the spool; "" for a rollout that is not kept.
        index: Its place in the file.
        contract: What the records of the model look like.
    """
    versions = rollout.policy_versions[rollout.loss_mask]
    return RolloutSummary(
        uid=rollout.uid,
        file=file,
        index=index,
        num_prompt_tokens=len(rollout.prompt_ids),
        num_completion_tokens=len(rollout.completion_ids),
        num_loss_tokens=int(rollout.loss_mask.sum()),
        num_singletons=int(rollout.singletons.sum()),
        num_keep_ids=len(rollout.keep_sets.ids),
        num_with_keep_set=int(((rollout.set_sizes > 0) & rollout.loss_mask).sum()),
        num_with_routes=len(rollout.routed_experts) if contract.num_moe_layers else 0,
        reward=rollout.reward,
        finish_reason=rollout.finish_reason,
        min_version=int(np.min(versions)),
        max_version=int(np.max(versions)),
    )


async def all_or_first_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error cancels the rest, so that no request continues for a group that has failed."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_daemon_thread(function: Callable[[], T], timeout_s: float, what: str) -> T:
    """Run a user's function next to the event loop. A daemon thread, because one that hangs must not keep the process alive.

    Args:
        function: A reward or an environment.
        timeout_s: The function's; after it the thread is left alone.
        what: Names the function in errors.

    Raises:
        RewardError: It took longer, or ended its thread (sys.exit).
        Exception: Whatever the function raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def body() -> None:
        try:
            settled: tuple[Callable[[Any], None], Any] = (future.set_result, function())
        except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
            settled = (future.set_exception, error)
        except BaseException as error:  # noqa: BLE001 - sys.exit() would end this thread alone, unnoticed
            settled = (future.set_exception, RewardError(f"{what} ended with {type(error).__name__}: {error}"))
        if not loop.is_closed():  # it may be closed when a function returns long after its time
            loop.call_soon_threadsafe(settle, *settled)

    Thread(target=body, daemon=True, name=what).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError as error:
        raise RewardError(f"{what} took more than {timeout_s:g} s (task.timeout_s)") from error
