"""Core attention on the CPU: packed sequences, grouped queries, causal; the reference for Transformer Engine's on a GPU."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_rl.batching import SequenceSlice
from megatron_rl.engine.context_parallel import gather_positions


class PackedAttention(torch.nn.Module):
    """Replaces Megatron's DotProductAttention, which refuses packed sequences and context parallelism.

    Dropout is 0 and the mask is causal. Of the configuration it knows the window of a layer, and the sinks (softmax_type
    "learnable"): a logit of each head that takes part in the softmax and attends to nothing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.context = pg_collection.cp
        self.scale = softmax_scale  # None: 1 / sqrt(head size)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.measures_logits = config.qk_clip
        self.current_max_attn_logits: Tensor | None = None
        """f32 [heads], over all passes since it was set to None; by this name in Transformer Engine's attention, too."""
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention of each sequence to itself, over n of the microbatch's N positions (all, without context parallelism).

        Args:
            query: [n, heads, d].
            key: [n, groups, d].
            value: [n, groups, dv].
            attention_mask: Unused: the mask is causal.
            packed_seq_params: Where the sequences of the microbatch end.

        Returns:
            [n, heads, dv].
        """
        if packed_seq_params is None:
            raise ValueError("this attention works on packed sequences only: pass packed_seq_params")
        ends = packed_seq_params.cu_seqlens_q.tolist()
        size, rank = self.context.size(), self.context.rank()
        slices = SequenceSlice.of(ends, size, rank)
        key, value = (gather_positions(x, slices, self.context, sum_gradients=True) for x in (key, value))
        own = torch.from_numpy(slices.own).to(query.device)
        sequences = [
            (query[start // size : end // size], key[start:end], value[start:end], own[start // size : end // size] - start)
            for start, end in pairwise(ends)
            if end > start
        ]
        if self.measures_logits:
            for q, k, _value, place in sequences:
                self._measure(q.detach(), k.detach(), place)
        attend = self._attend if self.softmax_offset is None else self._attend_with_sinks
        return torch.cat([attend(*sequence) for sequence in sequences])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> ShardedStateDict:
        """The sinks are sharded over tensor-parallel ranks like the heads."""
        own: dict[str, Any] = self.state_dict(keep_vars=True)  # the optimizer finds its state by the parameters themselves
        return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, place: Tensor) -> Tensor:
        """Attention of one sequence; place: i64 [queries], the position of each query in it."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, length, d]
        mask = None if self.window is None and len(query) == len(key) else self._visible(place, len(key))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def _attend_with_sinks(self, query: Tensor, key: Tensor, value: Tensor, place: Tensor) -> Tensor:
        assert self.softmax_offset is not None
        scores = self._logits(query, key, place)
        v = value.transpose(0, 1).repeat_interleave(query.shape[1] // value.shape[1], dim=0)
        sinks = self.softmax_offset[:, None, None].to(scores.dtype).expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype)
        return (weights @ v).transpose(0, 1)

    def _logits(self, query: Tensor, key: Tensor, place: Tensor) -> Tensor:
        """[heads, queries, length]; -inf where a token does not attend to another."""
        q, k = query.transpose(0, 1), key.transpose(0, 1).repeat_interleave(query.shape[1] // key.shape[1], dim=0)
        scores = q @ k.transpose(1, 2) * (self.scale or query.shape[-1] ** -0.5)
        return scores.masked_fill(~self._visible(place, len(key)), -torch.inf)

    def _measure(self, query: Tensor, key: Tensor, place: Tensor) -> None:
        found = self._logits(query.float(), key.float(), place).amax(dim=(1, 2))
        before = self.current_max_attn_logits
        self.current_max_attn_logits = found if before is None else torch.maximum(before, found)

    def _visible(self, place: Tensor, length: int) -> Tensor:
        """bool [queries, length]: whether the token of a row attends to that of a column."""
        distance = place[:, None] - torch.arange(length, device=place.device)
        return (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)
