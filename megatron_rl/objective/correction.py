"""What is left of the difference between the sampler and the trainer: weights and masks, all detached."""

import torch
from torch import Tensor

from megatron_rl.config.sections import Objective
from megatron_rl.objective.surrogate import sequence_mean
from megatron_rl.objective.token_batch import TokenBatch

MAX_LOG_RATIO = 20.0
"""exp of it is 5e8: far beyond any clip, and still finite, so that a ratio times a zero is 0 and not NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def correction_weights(old_logprobs: Tensor, batch: TokenBatch, objective: Objective) -> Tensor:
    """f32 [M], from w = p_old / p_rollout, of old log-probs without gradient; 0 for a token that is left out.

    truncate: min(w, high). mask_token: w inside [low, high], else 0 (IcePop). mask_sequence: 0 for a whole
    sequence whose geometric mean of w is outside [low, high]; otherwise its tokens as with truncate: a mean bounds no token.
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
    """bool [M]: false for the tokens of a sequence with a negative advantage and mean(log p_rollout - log p) > delta.

    DeepSeek-V3.2, arXiv 2512.02556, section 3.1: a bad sequence that the policy has already moved away from teaches nothing more.
    """
    drift = sequence_mean(batch.rollout_logprobs - logp.detach(), batch)[batch.sequence]
    return ~((batch.advantages < 0) & (drift > delta))


def reference_kl(log_ratio: Tensor, logp: Tensor, reference_logprobs: Tensor) -> Tensor:
    """f32 [M], with gradient: (p / p_old) (p_ref / p - log(p_ref / p) - 1), the k3 estimator, unbiased for tokens of p_old.

    The ratio carries gradient (same source as above); both log-probs have to be over the same support.
    """
    log_reference = bounded(reference_logprobs - logp)
    return log_ratio.exp() * (log_reference.exp() - log_reference - 1.0)


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)
