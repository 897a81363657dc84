"""The objectives written out token by token in Python floats, and random batches to try them on."""

from dataclasses import dataclass
from math import exp

import numpy as np
import torch

from megatron_rl.batching import Microbatch
from megatron_rl.config.sections import Objective
from megatron_rl.records import RaggedIds


@dataclass(frozen=True)
class Tokens:
    """A batch as lists: one entry a loss token, `sequence` saying whose it is."""

    logp: list[float]
    old: list[float]
    rollout: list[float]
    reference: list[float]
    advantage: list[float]
    sequence: list[int]

    def mean_over(self, sequence: int, values: list[float]) -> float:
        mine = [v for v, s in zip(values, self.sequence, strict=True) if s == sequence]
        return sum(mine) / len(mine)


def reference_loss(o: Objective, t: Tokens, frozen: Tokens, num_tokens: int, num_sequences: int) -> float:
    """The loss at t.logp. What carries no gradient is taken at `frozen`, the same tokens where the gradient is asked for."""
    return sum(_token_loss(o, t, frozen, i, num_tokens, num_sequences) for i in range(len(t.logp)))


def _token_loss(o: Objective, t: Tokens, frozen: Tokens, i: int, num_tokens: int, num_sequences: int) -> float:
    old = t.rollout if o.old_policy == "rollout" else t.old
    log_ratios = [p - q for p, q in zip(t.logp, old, strict=True)]
    advantage, sequence = t.advantage[i], t.sequence[i]
    if o.name == "cispo":
        ratio = exp(frozen.logp[i] - old[i])
        term = -min(max(ratio, 1 - o.clip_low), 1 + o.clip_high) * advantage * t.logp[i]
    else:
        ratio = exp(log_ratios[i] if o.name == "grpo" else t.mean_over(sequence, log_ratios))
        term = -min(ratio * advantage, min(max(ratio, 1 - o.clip_low), 1 + o.clip_high) * advantage)
    if o.off_policy_sequence_delta is not None and advantage < 0:
        drift = frozen.mean_over(sequence, [q - p for p, q in zip(frozen.logp, frozen.rollout, strict=True)])
        term = 0.0 if drift > o.off_policy_sequence_delta else term
    if o.kl_coefficient:
        log_reference = t.reference[i] - t.logp[i]
        term += o.kl_coefficient * exp(log_ratios[i]) * (exp(log_reference) - log_reference - 1)
    per_token = _weight(o, t, old, i) * term
    if o.normalisation == "token":
        return per_token / num_tokens
    return per_token / t.sequence.count(sequence) / num_sequences


def _weight(o: Objective, t: Tokens, old: list[float], i: int) -> float:
    weight = exp(old[i] - t.rollout[i])
    inside = o.correction_low <= weight <= o.correction_high
    if o.correction == "none":
        return 1.0
    if o.correction == "mask_token":
        return weight if inside else 0.0
    if o.correction == "mask_sequence":
        mean = exp(t.mean_over(t.sequence[i], [p - q for p, q in zip(old, t.rollout, strict=True)]))
        if not o.correction_low <= mean <= o.correction_high:
            return 0.0
    return min(weight, o.correction_high)


def random_microbatch(rng: np.random.Generator, lengths: list[int], *, first_number: int = 0, padding: int = 2) -> Microbatch:
    """Sequences of `lengths` positions, their last without loss, a third of the others too; then padding."""
    num_positions = sum(lengths) + padding
    sequence = np.concatenate([*(np.full(n, first_number + i) for i, n in enumerate(lengths)), np.full(padding, -1)]).astype(
        np.int32
    )
    loss = (rng.random(num_positions) < 0.67) & (sequence >= 0)
    ends = np.cumsum([0, *lengths])[1:]
    loss[ends - 1] = False
    loss[ends - 2] = True  # every sequence has a loss token
    singleton = loss & (rng.random(num_positions) < 0.4)
    advantages = rng.choice([-1.3, 0.6, 1.1], len(lengths) + 1)[np.where(sequence < 0, len(lengths), sequence - first_number)]
    return Microbatch(
        tokens=np.zeros(num_positions, dtype=np.int64),
        positions=np.zeros(num_positions, dtype=np.int64),
        segment_ends=np.unique([0, *ends, num_positions]).astype(np.int32),
        targets=np.zeros(num_positions, dtype=np.int64),
        loss_mask=loss,
        keep_sets=RaggedIds.empty(num_positions),
        full_rows=loss & ~singleton & (rng.random(num_positions) < 0.2),
        singleton=singleton,
        temperature=np.ones(num_positions, dtype=np.float32),
        rollout_logprobs=np.where(loss & ~singleton, -rng.random(num_positions), 0).astype(np.float32),
        advantages=np.where(loss, advantages, 0).astype(np.float32),
        staleness=np.where(loss, rng.integers(0, 3, num_positions), 0).astype(np.int32),
        sequence=sequence,
        completion_index=np.full(num_positions, -1, dtype=np.int32),
        routed_experts=None,
        route_mask=None,
        route_positions=None,
        num_padding=padding,
    )


def random_policies(rng: np.random.Generator, m: Microbatch, spread: float = 0.6) -> dict[str, torch.Tensor]:
    """f64 [N] log-probs around the recorded ones: of the trained, the old and the reference policy; 0 on singletons."""
    wide = m.loss_mask & ~m.singleton

    def around(scale: float) -> torch.Tensor:
        return torch.from_numpy(np.where(wide, m.rollout_logprobs + rng.normal(size=m.num_positions) * scale, 0.0))

    return {"logp": around(spread), "old": around(spread), "reference": around(spread)}


def tokens_of(m: Microbatch, policies: dict[str, torch.Tensor]) -> Tokens:
    def chosen(values) -> list[float]:
        return np.asarray(values)[m.loss_mask].astype(float).tolist()

    return Tokens(
        logp=chosen(policies["logp"]),
        old=chosen(policies["old"]),
        rollout=chosen(m.rollout_logprobs),
        reference=chosen(policies["reference"]),
        advantage=chosen(m.advantages),
        sequence=m.sequence[m.loss_mask].tolist(),
    )
