"""Corrects for what remains of the difference between sampler and trainer: weights and masks, all detached."""

import torch
from torch import Tensor

from megatron_rl.config.sections import Objective
from megatron_rl.objective.surrogate import sequence_mean
from megatron_rl.objective.token_batch import TokenBatch

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: far beyond any clip, and still finite, so that a ratio times zero is 0 and not NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio, clamped so that its exp is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def correction_weights(old_logprobs: Tensor, batch: TokenBatch, objective: Objective) -> Tensor:
    """Importance weights, from w = p_old / p_rollout.

    truncate: min(w, high). mask_token: w inside [low, high], else 0 (IcePop). mask_sequence: 0 for all tokens of a sequence
    whose geometric mean of w is outside [low, high]; otherwise its tokens as with truncate: a mean bounds no token.

    Args:
        old_logprobs: f32 [M], without gradient.
        batch: Of the same M tokens.
        objective: Names the correction and its bounds.

    Returns:
        f32 [M]; 0 for a token that is left out.
    """
    log_weight = bounded(old_logprobs - batch.rollout_logprobs)
    weight = log_weight.exp()
    low, high = objective.correction_low, objective.correction_high
    if objective.correction == "none":
        return torch.ones_like(weight)
    if objective.correction == "truncate":
        return weight.clamp(max=high)
    if objective.correction == "mask_token":
        return weight * _inside(weight, low, high)
    geometric_mean = sequence_mean(log_weight, batch).exp()
    return weight.clamp(max=high) * _inside(geometric_mean, low, high)[batch.sequence]


def on_policy_sequences(logp: Tensor, batch: TokenBatch, delta: float) -> Tensor:
    """Masks sequences with a negative advantage that the policy has moved away from: they teach nothing more.

    DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

    Args:
        logp: f32 [M], the trainer's.
        batch: Of the same M tokens.
        delta: Of a sequence's mean(log p_rollout - log p): beyond it the policy has moved away.

    Returns:
        bool [M]: false for the tokens of masked sequences.
    """
    drift = sequence_mean(batch.rollout_logprobs - logp.detach(), batch)[batch.sequence]
    return ~((batch.advantages < 0) & (drift > delta))


def reference_kl(log_ratio: Tensor, logp: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The KL to the reference: (p / p_old) (p_ref / p - log(p_ref / p) - 1), the k3 estimator, unbiased for tokens of p_old.

    The ratio carries gradient (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    Args:
        log_ratio: f32 [M], log p - log p_old, bounded.
        logp: f32 [M], log p.
        reference_logprobs: f32 [M], over the same support as `logp`.

    Returns:
        f32 [M], with gradient.
    """
    log_reference = bounded(reference_logprobs - logp)
    return log_ratio.exp() * (log_reference.exp() - log_reference - 1.0)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)
