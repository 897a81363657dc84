"""Sequences sampled from the oracle: rollouts whose log-probs, keep-sets and experts are computed in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batching import Spool
from megatron_rl.preflight.oracle import Choices, Oracle
from megatron_rl.records import PlanEntry, RaggedIds, Rollout, Sampling, StepPlan, write_payload

NUM_SEQUENCES = 8
_UNTRUNCATED, _WITH_TOOL_TOKENS, _WITHOUT_LOSS = 3, 5, 6
"""Numbers of the sequences that differ from the others in one feature."""
_MIN_MARGIN = 1e-4
"""A router that chooses by less than this in float64 may choose differently in float32; such a sequence is sampled again."""


@dataclass(frozen=True)
class Scored:
    """A rollout, and the oracle's values of its loss tokens."""

    rollout: Rollout
    log_probs: np.ndarray  # f64 [loss tokens]
    entropies: np.ndarray  # f64 [loss tokens]


def sample_sequences(oracle: Oracle, sampling: Sampling, seed: int, *, forced_experts: bool) -> list[Scored]:
    """Samples sequences with random prompts and lengths.

    Args:
        oracle: The model to sample from.
        sampling: Sampling parameters; one sequence is sampled without top-p and top-k.
        seed: Of the random generator.
        forced_experts: Whether the experts are random instead of the routers' choice.

    Returns:
        NUM_SEQUENCES rollouts with the oracle's values.
    """
    random = np.random.default_rng(seed)
    found: list[Scored] = []
    while len(found) < NUM_SEQUENCES:
        number = len(found)
        own = replace(sampling, top_p=1.0, top_k=0) if number == _UNTRUNCATED else sampling
        scored, margin = _sample(oracle, f"g{seed:04d}.{number}", own, _loss_mask(number, random), random, forced_experts)
        if margin > _MIN_MARGIN:
            found.append(scored)
    return found


def supervised_loss(oracle: Oracle, scored: Sequence[Scored]) -> Tensor:
    """-mean log p over the loss tokens in float64, differentiable, with the experts that the routers choose."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rollout in (s.rollout for s in scored):
        logits, _ = oracle.logits(np.concatenate([rollout.prompt_ids, rollout.completion_ids]))
        for c in np.flatnonzero(rollout.loss_mask):
            total = total - _token(logits[len(rollout.prompt_ids) - 1 + c], rollout, int(c))[0]
            count += 1
    return total / count


def write_plan(run_dir: Path, step: int, rollouts: Sequence[Rollout]) -> str:
    """Writes payload and step plan to the spool of `run_dir`; returns the step plan's name."""
    spool = Spool(run_dir)
    spool.create()
    file = spool.payload_name(f"sequences_{step}")
    write_payload(spool.path(file), rollouts)
    advantages = np.random.default_rng(step).normal(size=len(rollouts))
    entries = tuple(
        PlanEntry(r.uid, number, file, number, r.num_tokens, int(r.loss_mask.sum()), float(advantage))
        for number, (r, advantage) in enumerate(zip(rollouts, advantages, strict=True))
    )
    return spool.write_plan(StepPlan(step, entries))


def _loss_mask(number: int, random: np.random.Generator) -> np.ndarray:
    mask = np.ones(int(random.integers(3, 9)), dtype=bool)
    mask[1:2] = number != _WITH_TOOL_TOKENS
    return mask & (number != _WITHOUT_LOSS)


def _sample(
    oracle: Oracle, uid: str, sampling: Sampling, mask: np.ndarray, random: np.random.Generator, forced_experts: bool
) -> tuple[Scored, float]:
    """One sequence, token by token, and the smallest margin of its routers' choices (infinite if they have none)."""
    vocab, num_prompt = oracle.architecture.vocab_size, int(random.integers(2, 14))
    tokens = random.integers(0, vocab, num_prompt)
    experts = _random_experts(oracle, num_prompt + len(mask), random) if forced_experts else None
    sets: list[np.ndarray] = []
    for is_loss in mask:
        if not is_loss:  # the environment's
            sets.append(np.zeros(0, dtype=np.int64))
            tokens = np.append(tokens, random.integers(0, vocab))
            continue
        logits, _ = _forward(oracle, tokens, experts)
        kept = keep_set(logits[-1].numpy() / sampling.temperature, sampling)
        z = logits[-1].numpy()[kept] / sampling.temperature
        tokens = np.append(tokens, random.choice(kept, p=np.exp(z - z.max()) / np.exp(z - z.max()).sum()))
        sets.append(kept if sampling.truncates else kept[:0])
    logits, choices = _forward(oracle, tokens, experts)
    rollout = _rollout(uid, tokens, num_prompt, mask, sets, _recorded(choices, len(tokens)), sampling)
    of_loss = [[float(v) for v in _token(logits[num_prompt - 1 + c], rollout, int(c))] for c in np.flatnonzero(mask)]
    log_probs, entropies = np.array(of_loss, dtype=np.float64).reshape(-1, 2).T
    rollout.logprobs[mask] = log_probs
    return Scored(rollout, log_probs, entropies), choices.margin if choices and not forced_experts else float("inf")


@torch.no_grad()
def _forward(oracle: Oracle, tokens: np.ndarray, experts: np.ndarray | None) -> tuple[Tensor, Choices | None]:
    return oracle.logits(tokens, None if experts is None else experts[: len(tokens)])


def keep_set(z: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Ids that remain after top-k and then top-p: the most probable ones until their mass reaches top_p.

    Args:
        z: Logits divided by the temperature, [vocab_size].
        sampling: Sampling parameters.

    Returns:
        The ids, the most probable first.
    """
    order = np.argsort(-z)[: sampling.top_k or None]
    p = np.exp(z[order] - z[order].max())
    before = np.concatenate([[0.0], np.cumsum(p / p.sum())[:-1]])
    return order[before < sampling.top_p]


def _token(logits: Tensor, rollout: Rollout, c: int) -> tuple[Tensor, Tensor]:
    """log p of completion token c and the entropy of the distribution that it was sampled from. logits: [V], f64."""
    kept = rollout.keep_sets[c]
    ids = torch.from_numpy(kept.astype(np.int64)) if len(kept) else torch.arange(len(logits))
    log_p = (logits[ids] / rollout.sampling.temperature).log_softmax(0)
    return log_p[ids == int(rollout.completion_ids[c])].sum(), -(log_p.exp() * log_p).sum()


def _random_experts(oracle: Oracle, num_tokens: int, random: np.random.Generator) -> np.ndarray | None:
    """[num_tokens, L, K], no expert twice for a token; None in a dense model."""
    moe = oracle.architecture.moe
    if moe is None:
        return None
    return random.random((num_tokens, len(moe.layers), moe.num_experts)).argsort(axis=-1)[..., : moe.top_k]


def _recorded(choices: Choices | None, num_tokens: int) -> np.ndarray:
    """u8 [num_tokens - 1, L, K]: a rollout has no route for its last token."""
    if choices is None:
        return np.zeros((num_tokens - 1, 0, 0), dtype=np.uint8)
    return torch.stack(choices.chosen, dim=1).numpy().astype(np.uint8)[:-1]


def _rollout(
    uid: str,
    tokens: np.ndarray,
    num_prompt: int,
    mask: np.ndarray,
    sets: Sequence[np.ndarray],
    experts: np.ndarray,
    sampling: Sampling,
) -> Rollout:
    """The rollout, with log-probs of 0."""
    return Rollout(
        uid=uid, prompt_ids=tokens[:num_prompt].astype(np.int32), completion_ids=tokens[num_prompt:].astype(np.int32),
        logprobs=np.zeros(len(mask), dtype=np.float32), keep_sets=RaggedIds.of(sets), routed_experts=experts,
        policy_versions=np.zeros(len(mask), dtype=np.int32), loss_mask=mask, sampling=sampling,
        finish_reason="length", reward=0.0,
    )  # fmt: skip
