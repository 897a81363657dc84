"""Core attention on the CPU: packed sequences, grouped queries, causal; the reference for Transformer Engine's on a GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Takes the place of Megatron's DotProductAttention, which refuses packed sequences. Dropout is 0 and the mask is causal."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale  # None: 1 / sqrt(head size)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, packed_seq_params: PackedSeqParams | None = None, **_: Any
    ) -> Tensor:
        """query [N, heads, d], key and value [N, groups, d], each sequence attending to itself; returns [N, heads, d]."""
        if packed_seq_params is None:
            raise ValueError("this attention works on packed sequences alone: pass packed_seq_params")
        ends = packed_seq_params.cu_seqlens_q.tolist()
        segments = [slice(start, end) for start, end in zip(ends, ends[1:]) if end > start]
        return torch.cat([self._attend(query[s], key[s], value[s]) for s in segments])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, length, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
