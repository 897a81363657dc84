"""Log-probabilities over keep-sets from hidden states and the output weight: the public operation and its gradient.

log p_t = z_y - logsumexp_{j in K_t} z_j,    z_j = (weight_j . hidden_t) / temperature_t
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.keep_set import cpu_kernels
from megatron_rl.keep_set.accumulate import accumulation_dtype
from megatron_rl.keep_set.collectives import gather_rows, group_size, reduce_hidden_gradient
from megatron_rl.keep_set.dense_route import add_dense_gradients, dense_blocks, dense_statistics
from megatron_rl.keep_set.pair_route import add_weight_gradient, logit_gradients, pair_statistics
from megatron_rl.keep_set.sets import KeepSets, TokenKind
from megatron_rl.keep_set.shard_plan import Shard, ShardPlan, make_shard_plan
from megatron_rl.keep_set.statistics import entropy, log_probability, merge_across_ranks, no_statistics
from megatron_rl.keep_set.weight_gradient import WeightGradient


class KeepSetOutput(NamedTuple):
    """Values of T positions, the same on every tensor-parallel rank; 0 for unscored tokens and for singletons."""

    log_probs: Tensor  # fp32 [T]
    entropy: Tensor | None  # fp32 [T], nats, over the token's own support (its set, or the vocabulary); None if not asked for


def keep_set_log_probs(
    hidden: Tensor,
    weight: Tensor,
    keep_sets: KeepSets,
    *,
    temperature: float | Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    needs_entropy: bool = True,
    entropy_has_gradient: bool = False,
) -> KeepSetOutput:
    """Log-probabilities of the targets and entropies, each over its token's keep-set; exact, without [tokens, vocabulary] logits.

    Values and gradients are bitwise reproducible for the same layout, and every sum is accumulated in fp32. Without gradient
    (torch.no_grad) nothing is kept.

    Args:
        hidden: [T, H], or [T / tp, H] with sequence parallelism: this rank's part of the sequence. It enters the tensor-parallel
            region here: its gradient is all-reduced (reduce-scattered with sequence parallelism) over the group.
        weight: [V_padded / tp, H], this rank's vocabulary rows, of the hidden states' dtype. If it has Megatron's `main_grad`,
            its gradient is added there, see WeightGradient.
        keep_sets: Keep-sets of all T positions, the same on every rank, checked once by `check_keep_sets`. This call checks
            shapes, the range of the ids and that each target is in its set, because a violation of these would give a
            plausible, wrong number.
        temperature: > 0; divides the logits; a number or fp32 [T] (anything positive where unscored).
        vocab_size: Ids without padding; rows beyond it never take part.
        group: The tensor-parallel group; None without tensor parallelism. All its ranks must call.
        sequence_parallel: Whether `hidden` is this rank's part of the sequence.
        needs_entropy: Whether entropies are computed.
        entropy_has_gradient: For an entropy bonus; it costs a few operations per pair. Otherwise the entropy is a plain number.

    Returns:
        Values of all T positions, the same on every rank of the group.

    Raises:
        ValueError: Shapes or dtypes that do not fit together, or a temperature that is not positive and finite.
        ContractError: A keep-set that breaks its contract.
    """
    shard = Shard.of(weight.shape[0], vocab_size, group)
    _check_shapes(hidden, weight, keep_sets, temperature, num_parts=group_size(group) if sequence_parallel else 1)
    call = _Call(
        keep_sets=keep_sets,
        plan=make_shard_plan(keep_sets, shard, vocab_size, hidden.device),
        shard=shard,
        temperature=temperature.to(hidden.device) if isinstance(temperature, Tensor) else float(temperature),
        group=group,
        sequence_parallel=sequence_parallel,
        needs_entropy=needs_entropy,
        entropy_has_gradient=entropy_has_gradient,
    )
    log_probs, entropies = _KeepSetLogProbs.apply(hidden, weight, call)
    return KeepSetOutput(log_probs, entropies if needs_entropy else None)


@torch.no_grad()
def entropy_full(
    hidden: Tensor,
    weight: Tensor,
    sample: Tensor,
    *,
    temperature: float | Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Entropies over the full vocabulary of some positions, without gradient. They cost S dense rows.

    Args:
        hidden: As for `keep_set_log_probs`.
        weight: As for `keep_set_log_probs`.
        sample: int64 [S], distinct positions, the same on every rank.
        temperature: As for `keep_set_log_probs`.
        vocab_size: Ids without padding.
        group: The tensor-parallel group.
        sequence_parallel: Whether `hidden` is this rank's part of the sequence.

    Returns:
        fp32 [S], nats.
    """
    num_tokens = hidden.shape[0] * (group_size(group) if sequence_parallel else 1)
    kinds = torch.full((num_tokens,), TokenKind.UNSCORED, dtype=torch.uint8, device=sample.device)
    kinds[sample] = TokenKind.FULL
    full_tokens = KeepSets(
        target_ids=torch.zeros_like(kinds, dtype=torch.int64),
        kinds=kinds,
        keep_ids=torch.empty(0, dtype=torch.int32, device=sample.device),
        keep_offsets=torch.zeros(num_tokens + 1, dtype=torch.int64, device=sample.device),
    )
    out = keep_set_log_probs(
        hidden,
        weight,
        full_tokens,
        temperature=temperature,
        vocab_size=vocab_size,
        group=group,
        sequence_parallel=sequence_parallel,
    )
    assert out.entropy is not None
    return out.entropy[sample.to(hidden.device)]


@dataclass(frozen=True)
class _Call:
    """What one call computes, apart from its differentiable inputs."""

    keep_sets: KeepSets
    plan: ShardPlan
    shard: Shard
    temperature: float | Tensor
    group: dist.ProcessGroup | None
    sequence_parallel: bool
    needs_entropy: bool
    entropy_has_gradient: bool

    def pair_temperature(self) -> float | Tensor:
        """A number, or of each pair of the plan."""
        return self.temperature[self.plan.pairs.tokens] if isinstance(self.temperature, Tensor) else self.temperature

    def gather(self, hidden: Tensor) -> Tensor:
        return gather_rows(hidden, self.group) if self.sequence_parallel else hidden


class _KeepSetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        pair_logits, statistics = _statistics(call, hidden, weight)
        ctx.save_for_backward(hidden, weight, pair_logits, statistics)
        ctx.call, ctx.weight = call, weight  # the parameter itself: backward needs its attributes
        ctx.set_materialize_grads(False)
        computed = call.plan.computed
        of_computed = statistics[:, computed]
        log_probs, entropies = statistics.new_zeros(2, statistics.shape[1]).unbind()
        log_probs[computed] = log_probability(of_computed)
        entropies[computed] = entropy(of_computed)
        if not call.entropy_has_gradient:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, upstream_entropy: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if upstream is None:
            if upstream_entropy is None:
                return None, None, None
            upstream = torch.zeros_like(upstream_entropy)
        call, hidden = ctx.call, ctx.saved_tensors[0]
        weight_gradient = WeightGradient(ctx.weight, is_dense=call.plan.num_dense_tokens > 0) if ctx.needs_input_grad[1] else None
        if call.plan.is_empty:
            d_hidden = torch.zeros_like(hidden)
        else:
            d_hidden = _gradients(call, ctx.saved_tensors, (upstream, upstream_entropy), weight_gradient)
        return d_hidden, None if weight_gradient is None else weight_gradient.for_autograd(), None


def _statistics(call: _Call, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of this rank's pairs, [n], and the statistics of all tokens over the full vocabulary, [4, T]."""
    plan, num_tokens = call.plan, call.keep_sets.num_tokens
    if plan.is_empty:
        nothing = hidden.new_empty(0, dtype=accumulation_dtype(hidden))
        return nothing, no_statistics(num_tokens, nothing)
    hidden = call.gather(hidden)
    pair_logits = _kernels(hidden).pair_dots(hidden, weight, plan.pairs.rows, plan.pairs.offsets).div_(call.pair_temperature())
    statistics = pair_statistics(pair_logits, plan.pairs, call.needs_entropy)
    for block in dense_blocks(plan, call.keep_sets, call.shard, call.temperature):
        statistics[:, block.tokens] = dense_statistics(block, hidden[block.tokens], weight, call.needs_entropy)
    statistics[:, plan.computed] = merge_across_ranks(statistics[:, plan.computed], call.group)
    return pair_logits, statistics


def _gradients(
    call: _Call, saved: tuple[Tensor, ...], upstream: tuple[Tensor, Tensor | None], weight_gradient: WeightGradient | None
) -> Tensor:
    """The gradient of this rank's hidden states; that of the weight goes to weight_gradient.

    Args:
        call: What is computed.
        saved: By forward.
        upstream: [T] each, the gradients of the log-probs and of the entropies.
        weight_gradient: None where the weight needs none.
    """
    hidden, weight, pair_logits, statistics = saved
    plan, kernels, gathered = call.plan, _kernels(hidden), call.gather(hidden)
    of_log_probs, of_entropies = upstream
    d_pair_logits = logit_gradients(pair_logits, plan.pairs, statistics, *upstream).div_(call.pair_temperature())
    d_hidden = kernels.weighted_sums(d_pair_logits, weight, plan.pairs.rows, plan.pairs.offsets)
    if weight_gradient is not None:
        add_weight_gradient(kernels, d_pair_logits, gathered, plan.pairs, weight_gradient)
    for block in dense_blocks(plan, call.keep_sets, call.shard, call.temperature):
        of_block = of_log_probs[block.tokens], None if of_entropies is None else of_entropies[block.tokens]
        d_hidden[block.tokens] = add_dense_gradients(
            block, gathered[block.tokens], weight, statistics[:, block.tokens], of_block, weight_gradient
        )
    return reduce_hidden_gradient(d_hidden, plan.computed, call.group, call.sequence_parallel).to(hidden.dtype)


def _kernels(tensor: Tensor) -> ModuleType:
    """The pair route's kernels for the tensor's device."""
    if tensor.device.type == "cpu":
        return cpu_kernels
    from megatron_rl.keep_set import triton_kernels  # imported only where it is used: a CPU machine may have no Triton

    return triton_kernels


def _check_shapes(hidden: Tensor, weight: Tensor, keep_sets: KeepSets, temperature: float | Tensor, num_parts: int) -> None:
    """num_parts: into which the ranks cut the sequence."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight is {tuple(weight.shape)}; they must be [tokens, H] and [rows, H]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point() or hidden.device != weight.device:
        raise ValueError(
            f"hidden is {hidden.dtype} on {hidden.device}, weight is {weight.dtype} on {weight.device}; they must agree"
        )
    if hidden.shape[0] * num_parts != keep_sets.num_tokens:
        raise ValueError(
            f"hidden has {hidden.shape[0]} rows on each of {num_parts} ranks; the keep-sets have {keep_sets.num_tokens} tokens"
        )
    if isinstance(temperature, Tensor):
        if tuple(temperature.shape) != (keep_sets.num_tokens,):
            raise ValueError(f"temperature is {tuple(temperature.shape)}; it must be a number or ({keep_sets.num_tokens},)")
    elif not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature is {temperature}; it must be positive and finite (a greedy policy has no distribution to score)"
        )
