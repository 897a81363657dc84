"""QK-clip on the ranks: the largest attention logits of a step, and the rows of this rank's masters that they scale.

Core attention measures: ours on a CPU, Transformer Engine's (2.9 or later) on a GPU, both into `current_max_attn_logits` [heads
of this tensor-parallel rank] of the module.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.optimizers.megatron_state import parts_of, slice_of
from megatron_rl.optim.qk_clip import clip_factors, latent_key_value_rows, latent_query_rows, query_key_value_rows
from megatron_rl.weight_mapping import GroupedQueryAttention, HeldParameter, LatentAttention, ModelArchitecture
from megatron_rl.weight_mapping.param_mappings import QkvMapping

_LATENT_QUERIES = ("linear_q_proj.weight", "linear_q_up_proj.weight")
_LATENT_KEYS = ("linear_kv_up_proj.weight",)
_FUSED = ("linear_qkv.weight", "linear_qkv.bias")


@dataclass(frozen=True)
class _Slice:
    """What this rank updates of one parameter: elements start..stop of its flattened shard."""

    held: HeldParameter
    master: Tensor  # f32 [stop - start]
    start: int
    stop: int


class QkClip:
    """Scales the masters after each step of the optimizer, before Megatron copies them into the weights.

    Args:
        threshold: Attention logit above which a head is scaled down.
        optimizer: Megatron's, whose step is followed by the clip.
        model: What the model is.
        groups: This rank's process groups.
        chunks: This rank's chunks of the model.
        parameters: The tensors that Megatron trains on this rank, each with what the table says of it.
    """

    largest_logit: float
    """Largest attention logit of the last step, over this rank's layers and all heads."""

    def __init__(
        self,
        threshold: float,
        optimizer: MegatronOptimizer,
        model: ModelArchitecture,
        groups: ParallelGroups,
        chunks: Sequence[GPTModel],
        parameters: Iterable[tuple[HeldParameter, Tensor]],
    ) -> None:
        self.largest_logit = 0.0
        self._threshold, self._attention, self._groups = threshold, model.attention, groups
        self._modules = {
            layer.layer_number - 1: layer.self_attention.core_attention for c in chunks for layer in c.decoder.layers
        }
        self._slices: dict[int | None, list[_Slice]] = defaultdict(list)
        # Megatron has one part for all dense parameters of a rank, and attention is dense.
        part = parts_of(optimizer)[0]
        for held, parameter in parameters:
            if held.name.endswith((*_FUSED, *_LATENT_QUERIES, *_LATENT_KEYS)) and (found := slice_of(part, parameter)):
                self._slices[held.parameter.layer].append(_Slice(held, *found))
        part.optimizer.register_step_post_hook(lambda *_: self._clip())

    def forget(self) -> None:
        """Drop what was measured so far, before the passes of a step: it belongs to other passes."""
        for module in self._modules.values():
            module.current_max_attn_logits = None

    @torch.no_grad()
    def _clip(self) -> None:
        logits = self._logits_of_all_heads()
        self.largest_logit = float(logits.max())
        for number, layer in enumerate(self._modules):
            factors = clip_factors(logits[number], self._threshold)
            if bool((factors < 1).any()):
                for each in self._slices[layer]:
                    rows = each.held.shard(self._row_factors(each.held, factors))  # all of them are cut by rows
                    width = 1 if len(each.held.shape) == 1 else each.held.shape[1]
                    each.master.mul_(rows.repeat_interleave(width)[each.start : each.stop])

    def _logits_of_all_heads(self) -> Tensor:
        """f32 [layers of this rank, heads of the model]: largest over the tokens of all data-parallel ranks."""
        heads = self._attention.num_heads // self._groups.layout.tp
        nothing = torch.full((heads,), -torch.inf, device=self._groups.device)
        found = [nothing if m.current_max_attn_logits is None else m.current_max_attn_logits for m in self._modules.values()]
        own = torch.stack([logits.float().view(heads) for logits in found])
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._groups.dp_cp)
        parts = [torch.empty_like(own) for _ in range(self._groups.layout.tp)]
        dist.all_gather(parts, own, group=self._groups.tp)
        return torch.cat(parts, dim=1)

    def _row_factors(self, held: HeldParameter, factors: Tensor) -> Tensor:
        """The factor of each row of Megatron's full tensor."""
        if isinstance(self._attention, LatentAttention):
            of = latent_key_value_rows if held.name.endswith(_LATENT_KEYS) else latent_query_rows
            return of(self._attention, factors)
        assert isinstance(self._attention, GroupedQueryAttention)
        assert isinstance(held.parameter.mapping, QkvMapping)
        return replace(held.parameter.mapping, inputs=None).fuse(query_key_value_rows(self._attention, factors))
