"""The shard plan: from keep-sets to the work of one tensor-parallel rank.

A token takes one of three routes, each chosen from what all ranks know, so that they agree without communication:

* nothing: unscored tokens, and singletons, whose log-prob and gradient are 0 by definition;
* pairs: the rows of the weight that its set names are read one by one, cost ~ size of the set;
* dense: the full vocabulary in chunks, cost ~ vocabulary size; for tokens without truncation, and for sets so wide that a matrix
  product over the full vocabulary is cheaper than reading their rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.keep_set.collectives import group_size
from megatron_rl.keep_set.sets import KeepSets, TokenKind
from megatron_rl.records import ContractError

_WIDE_PAIRS_AT_ONCE = 1 << 22  # bounds the index tensors of wide sets


@dataclass(frozen=True)
class Shard:
    """The vocabulary rows of one rank: ids first <= id < stop are rows id - first of its weight, without padding rows."""

    first: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Without padding."""
        return self.stop - self.first

    @classmethod
    def of(cls, num_local_rows: int, vocab_size: int, group: dist.ProcessGroup | None) -> "Shard":
        """This rank's shard.

        Args:
            num_local_rows: Rows of the weight on each rank, padding included.
            vocab_size: Ids without padding.
            group: The tensor-parallel group.

        Raises:
            ValueError: The rows cannot hold the vocabulary.
        """
        rank, size = 0 if group is None else group.rank(), group_size(group)
        if not 0 < vocab_size <= size * num_local_rows:
            raise ValueError(
                f"vocab_size is {vocab_size}; {size} shards of {num_local_rows} rows hold 1..{size * num_local_rows} ids"
            )
        first = min(rank * num_local_rows, vocab_size)
        return cls(first, min(first + num_local_rows, vocab_size))


@dataclass(frozen=True)
class RouteCosts:
    """Forward and backward, in units of one (token, kept id) pair on the pair route; all are proportional to the hidden size."""

    dense_entry: float  # one logit of one token on the dense route
    dense_row: float  # one vocabulary row of a dense pass, however few its tokens: reading the weight, adding to its gradient


CPU_COSTS = RouteCosts(dense_entry=1 / 16, dense_row=1.0)  # one core with AVX-512, fp32: 1/12 at H = 256 to 1/21 at H = 1024
GPU_COSTS = RouteCosts(dense_entry=1 / 100, dense_row=1.0)  # a guess from bandwidth and bf16 FLOP/s: not measured


@dataclass(frozen=True)
class Pairs:
    """The n (token, kept id) pairs whose row is on this rank, by token: CSR over all T tokens, most of which may have none."""

    rows: Tensor  # int32 [n], of the local weight
    offsets: Tensor  # int32 [T + 1]
    tokens: Tensor  # int64 [n]
    targets: Tensor  # int64 [m <= T], which pairs are their token's target


@dataclass(frozen=True)
class ShardPlan:
    """The work of one call on one rank. All index tensors are on the device of the hidden states."""

    pairs: Pairs
    wide_tokens: Tensor  # int64, dense route with a set
    full_tokens: Tensor  # int64, dense route without
    computed: Tensor  # int64, all tokens on either route, the same on every rank: the others have value 0 and no gradient

    @property
    def num_dense_tokens(self) -> int:
        """Number of tokens on the dense route, with a set or without."""
        return len(self.wide_tokens) + len(self.full_tokens)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute, on any rank."""
        return len(self.computed) == 0


def make_shard_plan(keep_sets: KeepSets, shard: Shard, vocab_size: int, device: torch.device) -> ShardPlan:
    """Choose the route of each token, and select this rank's pairs.

    Args:
        keep_sets: Keep-sets of all T tokens, the same on every rank.
        shard: This rank's vocabulary rows.
        vocab_size: Ids without padding.
        device: Device of the hidden states.

    Raises:
        ContractError: What would give a plausible, wrong number: no set, a target outside its set, an id out of range.
    """
    costs = CPU_COSTS if device.type == "cpu" else GPU_COSTS
    sizes = keep_sets.sizes()
    full = keep_sets.kinds == TokenKind.FULL
    several = (keep_sets.kinds == TokenKind.KEEP_SET) & (sizes > 1)
    wide = several & _on_dense_route(torch.where(several, sizes, 0), vocab_size, costs)
    masks = (several & ~wide, wide, full, several | full)
    pair_tokens, wide_tokens, full_tokens, computed = (mask.nonzero().squeeze(1) for mask in masks)
    _refuse_bad_small_sets(keep_sets, sizes)
    _refuse_bad_targets(keep_sets, full_tokens, vocab_size)
    for ids, owner in pairs_in_blocks(keep_sets, wide_tokens):
        _refuse_bad_pairs(keep_sets, ids, owner, vocab_size)
    pairs = _local_pairs(keep_sets, pair_tokens, shard, vocab_size)
    selected = (tensor.to(device, non_blocking=True) for tensor in (*pairs, wide_tokens, full_tokens, computed))
    rows, offsets, tokens, targets, wide_tokens, full_tokens, computed = selected
    return ShardPlan(Pairs(rows, offsets, tokens, targets), wide_tokens, full_tokens, computed)


def _on_dense_route(sizes: Tensor, vocab_size: int, costs: RouteCosts) -> Tensor:
    """bool [T]: a set leaves the pair route if its logits cost less densely, and all that do also pay for the dense pass."""
    saved = (sizes - costs.dense_entry * vocab_size).clamp_min(0)
    return (saved > 0) & (saved.sum() > costs.dense_row * vocab_size)


def pairs_of(sets: KeepSets, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The kept ids of some tokens.

    Args:
        sets: Keep-sets of all tokens.
        tokens: int64 [m], ascending.

    Returns:
        The ids, int32 [n], and the token of each, int64 [n].
    """
    starts = sets.keep_offsets[tokens]
    sizes = sets.keep_offsets[tokens + 1] - starts
    before = sizes.cumsum(0) - sizes
    shift = torch.repeat_interleave(starts - before, sizes)
    return sets.keep_ids[torch.arange(len(shift), device=shift.device) + shift], torch.repeat_interleave(tokens, sizes)


def pairs_in_blocks(sets: KeepSets, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`pairs_of` a few tokens at a time: the sets of wide tokens together may hold as many ids as there are logits."""
    if len(tokens):
        at_once = max(1, _WIDE_PAIRS_AT_ONCE // max(1, int(sets.sizes()[tokens].max())))
        yield from (pairs_of(sets, some) for some in tokens.split(at_once))


def _local_pairs(sets: KeepSets, tokens: Tensor, shard: Shard, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, owner = pairs_of(sets, tokens)
    is_target = _refuse_bad_pairs(sets, ids, owner, vocab_size)
    here = (ids >= shard.first) & (ids < shard.stop)
    num_here_before = torch.nn.functional.pad(here.cumsum(0), (1, 0))  # [n + 1]
    sizes = torch.zeros_like(sets.target_ids)
    sizes[tokens] = sets.sizes()[tokens]
    offsets = num_here_before[torch.nn.functional.pad(sizes.cumsum(0), (1, 0))]
    return ids[here] - shard.first, offsets.int(), owner[here], is_target[here].nonzero().squeeze(1)


def _refuse_bad_pairs(sets: KeepSets, ids: Tensor, owner: Tensor, vocab_size: int) -> Tensor:
    """bool [n]: which pairs are their token's target.

    An id out of range would be missing in a sum, and the logit of a missing target would be 0.
    """
    is_target = ids == sets.target_ids[owner]
    if not len(ids):
        return is_target
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        bad = int(((ids < 0) | (ids >= vocab_size)).nonzero()[0])
        raise ContractError(
            rollout="unnamed", token=int(owner[bad]), value=int(ids[bad]), rule=f"keep-set ids must be in 0..{vocab_size - 1}"
        )
    tokens = torch.unique_consecutive(owner)
    found = owner[is_target]
    if len(found) != len(tokens) or not torch.equal(found, tokens):
        times = torch.zeros_like(sets.target_ids).index_add_(0, owner, is_target.long())[tokens]
        bad = int(tokens[(times != 1).nonzero()[0]])
        raise ContractError(
            rollout="unnamed", token=bad, value=int(sets.target_ids[bad]), rule="the target is in its keep-set, once"
        )
    return is_target


def _refuse_bad_small_sets(sets: KeepSets, sizes: Tensor) -> None:
    """Empty sets and singletons of another id: both would have log-prob 0, which is also a good singleton's."""
    small = ((sets.kinds == TokenKind.KEEP_SET) & (sizes < 2)).nonzero().squeeze(1)
    if bool((sizes[small] < 1).any()):
        bad = int(small[sizes[small] < 1][0])
        raise ContractError(rollout="unnamed", token=bad, value=0, rule="a KEEP_SET token keeps at least one id")
    foreign = sets.keep_ids[sets.keep_offsets[small]] != sets.target_ids[small]
    if bool(foreign.any()):
        bad = int(small[foreign][0])
        raise ContractError(
            rollout="unnamed", token=bad, value=int(sets.target_ids[bad]), rule="the target is in its keep-set, once"
        )


def _refuse_bad_targets(sets: KeepSets, full_tokens: Tensor, vocab_size: int) -> None:
    targets = sets.target_ids[full_tokens]
    outside = (targets < 0) | (targets >= vocab_size)
    if bool(outside.any()):
        bad = int(full_tokens[outside][0])
        raise ContractError(
            rollout="unnamed", token=bad, value=int(sets.target_ids[bad]), rule=f"target ids must be in 0..{vocab_size - 1}"
        )
