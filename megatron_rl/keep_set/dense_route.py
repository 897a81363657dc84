"""The dense route: all logits of some tokens, one vocabulary chunk at a time, forward and again backward.

For tokens without truncation, and for sets so wide that a matrix product is cheaper than reading their rows: these see the same
chunks through a mask. Neither [tokens, vocabulary] logits nor a [vocabulary, hidden] temporary exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.keep_set.accumulate import accumulation_dtype, add_product, product
from megatron_rl.keep_set.sets import KeepSets
from megatron_rl.keep_set.shard_plan import Shard, ShardPlan, pairs_in_blocks
from megatron_rl.keep_set.statistics import MAXIMUM, MOMENT, TARGET, TOTAL, entropy, no_statistics
from megatron_rl.keep_set.statistics import merge as merge_statistics
from megatron_rl.keep_set.weight_gradient import WeightGradient

_CHUNK_BYTES = 16 << 20  # of logits, and of widened weight rows
_TOKENS_AT_ONCE = 4096
_MASK_BYTES = 128 << 20  # one byte per logit of tokens with a set


@dataclass(frozen=True)
class DenseBlock:
    """N tokens that share one pass over the weight."""

    tokens: Tensor  # int64 [N]
    targets: Tensor  # int64 [N], rows of this shard; outside of it where another rank holds the target
    shard: Shard
    temperature: float | Tensor  # or [N, 1]
    keep_sets: KeepSets | None  # None: full tokens

    def mask(self) -> Tensor | None:
        """bool [N, rows of the shard], True where a row is not kept; None for full tokens. Large, so made again when needed."""
        if self.keep_sets is None:
            return None
        tokens = self.tokens.to(self.keep_sets.device)
        excluded = torch.ones(len(tokens), self.shard.num_rows, dtype=torch.bool, device=self.tokens.device)
        for ids, owner in pairs_in_blocks(self.keep_sets, tokens):
            rows = ids - self.shard.first
            here = (rows >= 0) & (rows < self.shard.num_rows)
            flat = torch.searchsorted(tokens, owner[here]) * self.shard.num_rows + rows[here]
            excluded.view(-1).index_fill_(0, flat.to(excluded.device), False)
        return excluded


def dense_blocks(plan: ShardPlan, keep_sets: KeepSets, shard: Shard, temperature: float | Tensor) -> Iterator[DenseBlock]:
    """The plan's dense tokens in groups that bound the memory; each group reads the weight once.

    Args:
        plan: The work of the call.
        keep_sets: Keep-sets of all T tokens.
        shard: This rank's vocabulary rows.
        temperature: A number, or [T].
    """
    masked_at_once = min(_TOKENS_AT_ONCE, max(256, _MASK_BYTES // max(1, shard.num_rows)))
    for tokens, sets, at_once in ((plan.wide_tokens, keep_sets, masked_at_once), (plan.full_tokens, None, _TOKENS_AT_ONCE)):
        for group in tokens.split(at_once) if len(tokens) else ():
            targets = keep_sets.target_ids[group.to(keep_sets.device)].to(group.device) - shard.first
            own_temperature = temperature[group, None] if isinstance(temperature, Tensor) else temperature
            yield DenseBlock(group, targets, shard, own_temperature, sets)


def dense_statistics(block: DenseBlock, hidden: Tensor, weight: Tensor, needs_entropy: bool) -> Tensor:
    """The block's statistics over this rank's vocabulary rows.

    Args:
        block: N tokens.
        hidden: [N, H], theirs.
        weight: [rows, H], this rank's.
        needs_entropy: Whether the row MOMENT is filled.

    Returns:
        [4, N], see statistics.py.
    """
    nothing = no_statistics(len(hidden), hidden.new_empty(0, dtype=accumulation_dtype(hidden)))
    parts = [nothing, *(_chunk_statistics(chunk, needs_entropy) for chunk in _chunks(block, hidden, weight))]
    return merge_statistics(torch.stack(parts))


def add_dense_gradients(
    block: DenseBlock,
    hidden: Tensor,
    weight: Tensor,
    statistics: Tensor,
    upstream: tuple[Tensor, Tensor | None],
    weight_gradient: WeightGradient | None,
) -> Tensor:
    """The block's gradients; that of the weight is added to `weight_gradient`.

    Args:
        block: N tokens.
        hidden: [N, H], theirs.
        weight: [rows, H], this rank's.
        statistics: [4, N], merged over all ranks.
        upstream: [N] each, the gradients of the log-probs and of the entropies.
        weight_gradient: None where the weight needs none.

    Returns:
        [N, H] in accumulation dtype, this rank's part of the gradient of `hidden`.
    """
    d_hidden = torch.zeros_like(hidden, dtype=accumulation_dtype(hidden))
    for chunk in _chunks(block, hidden, weight):
        d_logits = _logit_gradients(chunk, statistics, *upstream).div_(block.temperature)
        add_product(d_hidden, d_logits, chunk.rows)
        if weight_gradient is not None:
            weight_gradient.add_product(chunk.first_row, d_logits, hidden)
    return d_hidden


class _Chunk(NamedTuple):
    """A block's view of some vocabulary rows."""

    first_row: int
    rows: Tensor  # [chunk, H]
    logits: Tensor  # [N, chunk], of excluded rows too
    excluded: Tensor | None  # bool [N, chunk]
    hit: Tensor  # int64 [m], tokens whose target is in this chunk
    hit_row: Tensor  # int64 [m], and where


def _chunks(block: DenseBlock, hidden: Tensor, weight: Tensor) -> Iterator[_Chunk]:
    excluded = block.mask()
    rows_at_once = max(128, _CHUNK_BYTES // (max(hidden.shape) * accumulation_dtype(hidden).itemsize))
    for first in range(0, block.shard.num_rows, rows_at_once):
        last = min(first + rows_at_once, block.shard.num_rows)
        rows = weight[first:last]
        logits = product(hidden, rows.t()).div_(block.temperature)
        hit = ((block.targets >= first) & (block.targets < last)).nonzero().squeeze(1)
        yield _Chunk(first, rows, logits, None if excluded is None else excluded[:, first:last], hit, block.targets[hit] - first)


def _chunk_statistics(chunk: _Chunk, needs_entropy: bool) -> Tensor:
    """[4, N]; overwrites the chunk's logits."""
    logits = chunk.logits
    statistics = logits.new_zeros(4, len(logits))
    statistics[TARGET, chunk.hit] = logits[chunk.hit, chunk.hit_row]
    if chunk.excluded is not None:
        logits.masked_fill_(chunk.excluded, torch.finfo(logits.dtype).min)
    statistics[MAXIMUM] = logits.amax(1)
    shifted = logits.sub_(statistics[MAXIMUM][:, None])
    exponentials = _exp(shifted if not needs_entropy else shifted.clone(), chunk.excluded)
    statistics[TOTAL] = exponentials.sum(1)
    if needs_entropy:
        statistics[MOMENT] = exponentials.mul_(shifted).sum(1)
    return statistics


def _logit_gradients(chunk: _Chunk, statistics: Tensor, upstream: Tensor, upstream_entropy: Tensor | None) -> Tensor:
    """[N, chunk]; overwrites the chunk's logits.

    d log p / d z_j = 1[j = y] - p_j; d entropy / d z_j = -p_j log p_j - p_j entropy.
    """
    p = _exp(chunk.logits.sub_(statistics[MAXIMUM][:, None]).sub_(statistics[TOTAL].log()[:, None]), chunk.excluded)
    if upstream_entropy is None:
        d_logits = p.mul_(-upstream[:, None])
    else:
        d_logits = torch.special.entr(p).mul_(upstream_entropy[:, None])
        d_logits.addcmul_(p, -(upstream + upstream_entropy * entropy(statistics))[:, None])
    d_logits[chunk.hit, chunk.hit_row] += upstream[chunk.hit]
    return d_logits


def _exp(shifted: Tensor, excluded: Tensor | None) -> Tensor:
    """Exp in place, 0 where excluded.

    A CPU takes 20 to 50 times as long where exp underflows: e^-80 is as good as 0 in these sums.
    """
    exponentials = shifted.clamp_min_(-80.0).exp_()
    return exponentials if excluded is None else exponentials.masked_fill_(excluded, 0.0)
