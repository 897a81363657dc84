"""The policy terms, one value a loss token, before correction and normalisation; to be minimised.

All take log r = log p - log p_old [M] (gradient flows through it), log p [M] and a batch with advantages [M], and return the term
[M] and where a clip is active (bool [M]).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.objective.token_batch import TokenBatch


@dataclass(frozen=True)
class ClipRange:
    """Ratios are clipped to [1 - low, 1 + high]."""

    low: float
    high: float

    def clip(self, ratio: Tensor) -> Tensor:
        """The ratio, clipped."""
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)


def sequence_mean(values: Tensor, batch: TokenBatch) -> Tensor:
    """The mean over each sequence's loss tokens, singletons counted: [M] to [S]."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence, values) / batch.sequence_tokens


def grpo(log_ratio: Tensor, _logp: Tensor, batch: TokenBatch, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A): PPO's clipped surrogate (arXiv 1707.06347) with its own bound on each side (arXiv 2503.14476)."""
    return _clipped(log_ratio.exp(), batch.advantages, clip)


def gspo(log_ratio: Tensor, _logp: Tensor, batch: TokenBatch, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """As grpo, with exp(mean of log r over the sequence) for r, the same for all tokens of a sequence (arXiv 2507.18071)."""
    return _clipped(sequence_mean(log_ratio, batch).exp()[batch.sequence], batch.advantages, clip)


def cispo(log_ratio: Tensor, logp: Tensor, batch: TokenBatch, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """-sg(clip(r)) A log p: a clipped token keeps its gradient, with a bounded weight (arXiv 2506.13585)."""
    ratio = log_ratio.detach().exp()
    weight = clip.clip(ratio)
    return -weight * batch.advantages * logp, weight != ratio


SURROGATES: dict[str, Callable[[Tensor, Tensor, TokenBatch, ClipRange], tuple[Tensor, Tensor]]] = {
    "grpo": grpo,
    "gspo": gspo,
    "cispo": cispo,
}


def _clipped(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    plain, bounded = -ratio * advantages, -clip.clip(ratio) * advantages
    return torch.maximum(plain, bounded), plain < bounded
