"""QK-clip (MuonClip, Kimi K2): where a head's attention logits exceed a threshold, its queries and keys are scaled down.

A head's largest logit S over the step gives g = min(1, threshold / S). Where a head has its own queries and
keys, each is scaled by sqrt(g). Where heads share a key (the rotary part of latent attention), only the queries are scaled, by g.
"""

import torch
from torch import Tensor

from megatron_rl.weight_mapping import GroupedQueryAttention, LatentAttention


def clip_factors(max_logits: Tensor, threshold: float) -> Tensor:
    """The factor g of each head.

    Args:
        max_logits: [num_heads], the step's largest attention logits; -inf where a head has none.
        threshold: Logit above which a head is scaled down.

    Returns:
        [num_heads]; 1 where a head has no logit above the threshold.
    """
    return (threshold / max_logits.clamp(min=threshold)).clamp(max=1.0)


def query_key_value_rows(attention: GroupedQueryAttention, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The factor of each row of the q, k and v projections.

    The heads of a group share its key, and so the smallest of their factors: each of them comes below the threshold.

    Args:
        attention: The model's.
        factors: [num_heads], from `clip_factors`.

    Returns:
        [num_heads * head_dim] for q, [num_query_groups * head_dim] for k and for v.
    """
    groups = attention.num_query_groups
    root = factors.view(groups, -1).amin(dim=1).sqrt()
    k = root.repeat_interleave(attention.head_dim)
    q = root.repeat_interleave(attention.num_heads // groups * attention.head_dim)
    return q, k, torch.ones_like(k)


def latent_query_rows(attention: LatentAttention, factors: Tensor) -> Tensor:
    """The factor of each row of q's (up) projection: the rotary part multiplies the one key that all heads share.

    Args:
        attention: The model's.
        factors: [num_heads], from `clip_factors`.

    Returns:
        [num_heads * (qk_nope_head_dim + qk_rope_head_dim)].
    """
    sizes = torch.tensor([attention.qk_nope_head_dim, attention.qk_rope_head_dim], device=factors.device)
    return torch.stack([factors.sqrt(), factors], dim=1).repeat_interleave(sizes, dim=1).flatten()


def latent_key_value_rows(attention: LatentAttention, factors: Tensor) -> Tensor:
    """The factor of each row of the up projection of k and v.

    Args:
        attention: The model's.
        factors: [num_heads], from `clip_factors`.

    Returns:
        [num_heads * (qk_nope_head_dim + v_head_dim)].
    """
    sizes = torch.tensor([attention.qk_nope_head_dim, attention.v_head_dim], device=factors.device)
    return torch.stack([factors.sqrt(), torch.ones_like(factors)], dim=1).repeat_interleave(sizes, dim=1).flatten()
