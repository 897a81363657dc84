"""One microbatch from its rollouts: per sequence in Python, per token only in numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_rl.batching.microbatch import Microbatch
from megatron_rl.batching.options import AssemblyOptions
from megatron_rl.batching.packing import Alignment
from megatron_rl.records import RaggedIds, Rollout

Columns = dict[str, np.ndarray]
"""Arrays by the field of Microbatch."""


@dataclass(frozen=True)
class Member:
    """A rollout of a microbatch."""

    number: int
    """Number of its entry in the step plan."""
    rollout: Rollout
    advantage: float


def collate(members: Sequence[Member], step: int, alignment: Alignment, options: AssemblyOptions) -> Microbatch:
    """Collate rollouts into one microbatch.

    The members' segments follow one another, each padded to the alignment's multiple; a last segment fills the microbatch up to
    its own multiple. The routes are those of all positions: `cut_routes` cuts them to one rank's.

    Args:
        members: In the order of their segments; none gives a microbatch of padding.
        step: The step that consumes it, from which staleness counts.
        alignment: Alignment of segments and microbatch.
        options: What is replayed, and of which MoE layers.
    """
    lengths = [m.rollout.num_tokens for m in members]
    ends = np.cumsum([0] + [alignment.padded(length) for length in lengths])
    num_positions = alignment.padded_total(max(1, int(ends[-1])))
    columns = _blank(num_positions, options)
    set_sizes = np.zeros(num_positions, dtype=np.int64)
    for member, start in zip(members, ends[:-1], strict=True):
        _write_sequence(columns, member, int(start))
        targets = _write_targets(columns, member, int(start), step)
        if options.keep_set_replay:
            set_sizes[targets] = member.rollout.set_sizes
    for start, end, place in _padding(ends, lengths, num_positions):
        columns["positions"][start:end] = np.arange(place, place + end - start)
    kept = [m.rollout.keep_sets.ids for m in members] if options.keep_set_replay else []
    return Microbatch(
        **columns,
        segment_ends=np.unique(np.append(ends, num_positions)).astype(np.int32),
        keep_sets=RaggedIds.from_sizes(np.concatenate([np.zeros(0, dtype=np.int32), *kept]), set_sizes),
        full_rows=columns["loss_mask"] & (set_sizes == 0),
        num_padding=num_positions - sum(lengths),
    )


def _blank(num_positions: int, options: AssemblyOptions) -> Columns:
    """The arrays over positions as padding has them."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(num_positions, value, dtype=dtype)

    columns = {
        "tokens": full(0, np.int64),
        "positions": full(0, np.int64),
        "targets": full(0, np.int64),
        "loss_mask": full(False, np.bool_),
        "singleton": full(False, np.bool_),
        "temperature": full(1, np.float32),
        "rollout_logprobs": full(0, np.float32),
        "advantages": full(0, np.float32),
        "staleness": full(0, np.int32),
        "sequence": full(-1, np.int32),
        "completion_index": full(-1, np.int32),
    }
    if options.replays_routes:
        shape = (num_positions, len(options.moe_layers), options.contract.experts_per_token)
        columns["routed_experts"] = np.full(shape, np.iinfo(options.route_dtype).max, dtype=options.route_dtype)
        columns["route_mask"] = full(False, np.bool_)
        columns["route_positions"] = np.arange(num_positions)
    return columns


def _write_sequence(columns: Columns, member: Member, start: int) -> None:
    """What the model reads: tokens, their places, their experts."""
    r = member.rollout
    prompt_end, end = start + len(r.prompt_ids), start + r.num_tokens
    columns["tokens"][start:prompt_end] = r.prompt_ids
    columns["tokens"][prompt_end:end] = r.completion_ids
    columns["positions"][start:end] = np.arange(r.num_tokens)
    columns["sequence"][start:end] = member.number
    if "routed_experts" in columns:
        columns["routed_experts"][start : end - 1] = r.routed_experts
        columns["route_mask"][start : end - 1] = True


def _write_targets(columns: Columns, member: Member, start: int, step: int) -> slice:
    """What the loss reads. Completion token c is predicted one position before its own, at start + P - 1 + c; returns where."""
    r = member.rollout
    first = start + len(r.prompt_ids) - 1
    targets = slice(first, first + len(r.completion_ids))
    loss = r.loss_mask
    columns["loss_mask"][targets] = loss
    columns["singleton"][targets] = r.singletons
    columns["targets"][targets] = np.where(loss, r.completion_ids, 0)
    columns["temperature"][targets] = np.where(loss, r.sampling.temperature, 1.0)
    columns["rollout_logprobs"][targets] = np.where(loss, r.logprobs, 0.0)
    columns["advantages"][targets] = np.where(loss, member.advantage, 0.0)
    columns["staleness"][targets] = np.where(loss, step - r.policy_versions, 0)
    columns["completion_index"][targets] = np.where(loss, np.arange(len(loss)), -1)
    return targets


def _padding(ends: np.ndarray, lengths: Sequence[int], num_positions: int) -> list[tuple[int, int, int]]:
    """(start, end, first place within its segment) of each run of padding."""
    tails = [(int(start) + length, int(end), length) for (start, end), length in zip(pairwise(ends), lengths, strict=True)]
    return [*tails, (int(ends[-1]), num_positions, 0)]
