"""The definition, token by token in float64: what every faster path is tested against."""

import torch
from torch import Tensor

from megatron_rl.keep_set.sets import KeepSets, TokenKind


def reference_log_probs(
    hidden: Tensor, weight: Tensor, keep_sets: KeepSets, *, temperature: float | Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of one process, differentiable.

    Args:
        hidden: [T, H].
        weight: [V_padded, H].
        keep_sets: Keep-sets of the T tokens.
        temperature: A number, or [T].
        vocab_size: Ids without padding.

    Returns:
        float64 [T] each; entropies in nats.
    """
    log_probs, entropies = [], []
    temperatures = torch.as_tensor(temperature, dtype=torch.float64).expand(keep_sets.num_tokens)
    for t, kind in enumerate(keep_sets.kinds.tolist()):
        kept = keep_sets.keep_ids[keep_sets.keep_offsets[t] : keep_sets.keep_offsets[t + 1]].long()
        support = {
            TokenKind.UNSCORED: keep_sets.target_ids[t : t + 1],
            TokenKind.KEEP_SET: kept,
            TokenKind.FULL: torch.arange(vocab_size),
        }[kind]
        logits = weight[support].double() @ hidden[t].double() / temperatures[t]
        log_p = logits.log_softmax(0)
        log_probs.append(log_p[support == keep_sets.target_ids[t]].sum())
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropies)
