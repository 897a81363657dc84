"""Factors of rows, worked out by hand."""

import torch

from megatron_rl.optim.qk_clip import clip_factors, latent_key_value_rows, latent_query_rows, query_key_value_rows
from megatron_rl.weight_mapping import GroupedQueryAttention, LatentAttention


def test_only_heads_above_the_threshold_are_scaled() -> None:
    factors = clip_factors(torch.tensor([50.0, 400.0, 100.0, -torch.inf]), 100.0)
    assert factors.tolist() == [1.0, 0.25, 1.0, 1.0]


def test_heads_of_a_group_share_the_smallest_factor() -> None:
    attention = GroupedQueryAttention(num_heads=4, num_query_groups=2, head_dim=3, qk_norm=False)
    q, k, v = query_key_value_rows(attention, torch.tensor([1.0, 0.25, 1.0, 1.0]))
    assert q.tolist() == [0.5] * 6 + [1.0] * 6
    assert k.tolist() == [0.5] * 3 + [1.0] * 3
    assert v.tolist() == [1.0] * 6


def test_latent_attention_scales_the_rotary_part_on_the_side_of_the_queries_alone() -> None:
    attention = LatentAttention(num_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=2, qk_rope_head_dim=1, v_head_dim=3)
    factors = torch.tensor([0.25, 1.0])
    assert latent_query_rows(attention, factors).tolist() == [0.5, 0.5, 0.25, 1, 1, 1]
    assert latent_key_value_rows(attention, factors).tolist() == [0.5, 0.5, 1, 1, 1, 1, 1, 1, 1, 1]
