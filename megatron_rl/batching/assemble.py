"""From a plan to this rank's microbatches: read, check, lay out. Per sequence in Python, per token only in numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.batching.microbatch import Microbatch
from megatron_rl.batching.packing import Alignment, alignment_of, pack
from megatron_rl.batching.spool import Spool
from megatron_rl.batching.supervised import SupervisedPlan, as_rollout
from megatron_rl.records import ContractError, ModelContract, Payload, PayloadError, PlanEntry, Rollout, StepPlan, check_rollout
from megatron_rl.topology import Layout, RankCoords


@dataclass(frozen=True)
class AssemblyOptions:
    """What a rank's microbatches are to hold. Only moe_layers may differ between the ranks of one data-parallel replica."""

    contract: ModelContract
    max_tokens: int
    """Packed tokens of a microbatch, alignment's padding not counted."""
    sequence_parallel: bool = False
    keep_set_replay: bool = True
    """False: every loss token is normalised over the whole vocabulary, whatever its recorded set."""
    routing_replay: bool = True
    moe_layers: tuple[int, ...] = ()
    """The MoE layers of this rank, by their number among the model's MoE layers, in the order in which its routers want them."""

    @property
    def replays_routes(self) -> bool:
        return self.routing_replay and self.contract.num_moe_layers > 0

    @property
    def readable_contract(self) -> ModelContract:
        """The contract of a record of which only this rank's routes were read."""
        return replace(self.contract, num_moe_layers=len(self.moe_layers) if self.replays_routes else 0)

    @property
    def route_dtype(self) -> type[np.unsignedinteger]:
        """Its largest value is no expert, and stands where no route was recorded."""
        return np.uint8 if self.contract.num_experts < 256 else np.uint16


def microbatches_for(plan: StepPlan, spool: Spool, layout: Layout, coords: RankCoords, options: AssemblyOptions) -> list[Microbatch]:
    """The microbatches of one rank, in order; every data-parallel rank gets the same number.

    Raises PayloadError for a file that is missing, half written or not what the plan says, ContractError for a record that breaks its
    contract, PackingError for a sequence that fits no microbatch.
    """
    packing = _packing([e.num_tokens for e in plan.entries], layout, coords, options)
    mine = sorted(number for members in packing for number in members)
    rollouts = _read(plan, mine, spool, options)
    advantages = {number: plan.entries[number].advantage for number in mine}
    alignment = alignment_of(layout, options.sequence_parallel)
    return [_lay_out(members, rollouts, advantages, plan.step, alignment, options) for members in packing]


def supervised_microbatches(plan: SupervisedPlan, layout: Layout, coords: RankCoords, options: AssemblyOptions) -> list[Microbatch]:
    """The same for worked solutions: the loss on the solutions' tokens over the whole vocabulary, no replay, advantage 1.

    Raises ContractError for an empty prompt or solution and for ids outside the vocabulary.
    """
    plain = replace(options, routing_replay=False, keep_set_replay=False)
    packing = _packing([e.num_tokens for e in plan.examples], layout, coords, plain)
    rollouts = {number: as_rollout(plan.examples[number], plan.step, number) for members in packing for number in members}
    for rollout in rollouts.values():
        check_rollout(rollout, plain.readable_contract)
    alignment = alignment_of(layout, options.sequence_parallel)
    return [_lay_out(members, rollouts, dict.fromkeys(members, 1.0), plan.step, alignment, plain) for members in packing]


def _packing(lengths: Sequence[int], layout: Layout, coords: RankCoords, options: AssemblyOptions) -> list[list[int]]:
    multiple = layout.pp if layout.vpp > 1 else 1  # Megatron's interleaved schedule asks for a multiple of the stages
    return pack(lengths, num_ranks=layout.dp, max_tokens=options.max_tokens, microbatch_multiple=multiple)[coords.dp]


def _read(plan: StepPlan, numbers: Sequence[int], spool: Spool, options: AssemblyOptions) -> dict[int, Rollout]:
    """The rollouts of these entries, checked against contract and plan; each file is opened once."""
    payloads: dict[str, Payload] = {}
    rollouts = {}
    for number in numbers:
        entry = plan.entries[number]
        if entry.file not in payloads:
            payloads[entry.file] = spool.payload(entry.file)
        payload = payloads[entry.file]
        rollout = payload.rollout(entry.index, options.moe_layers if options.replays_routes else ())
        _check_against_plan(rollout, entry, payload, plan.step)
        check_rollout(rollout, options.readable_contract)
        rollouts[number] = rollout
    return rollouts


def _check_against_plan(rollout: Rollout, entry: PlanEntry, payload: Payload, step: int) -> None:
    planned = (entry.uid, entry.num_tokens, entry.num_loss_tokens)
    found = (rollout.uid, rollout.num_tokens, int(rollout.loss_mask.sum()))
    if found != planned:
        raise PayloadError(f"{payload.path}: record {entry.index} is (uid, tokens, loss tokens) {found}, the plan of step {step} says {planned}")
    newest = int(rollout.policy_versions.max(initial=0))
    if newest > step:
        rule = f"no token is newer than the step that consumes it ({step})"
        raise ContractError(rollout=rollout.uid, token=int(rollout.policy_versions.argmax()), value=f"policy version {newest}", rule=rule)


def _lay_out(
    members: Sequence[int], rollouts: dict[int, Rollout], advantages: dict[int, float], step: int, alignment: Alignment, options: AssemblyOptions
) -> Microbatch:
    """One microbatch: the members' segments, each padded to its own multiple, then a segment that fills up to the whole's."""
    lengths = [rollouts[number].num_tokens for number in members]
    ends = np.cumsum([0] + [alignment.padded(length) for length in lengths])
    num_positions = alignment.padded_total(max(1, int(ends[-1])))
    columns = _blank(num_positions, options)
    for number, start in zip(members, ends):
        _write_sequence(columns, rollouts[number], int(start))
        _write_targets(columns, rollouts[number], int(start), step, options.keep_set_replay)
        columns["sequence"][start : start + rollouts[number].num_tokens] = number
        columns["advantages"][start : start + rollouts[number].num_tokens] = advantages[number]
    columns["advantages"][~columns["loss_mask"]] = 0.0
    for start, end, length in _padding(ends, lengths, num_positions):
        columns["positions"][start:end] = np.arange(length, length + end - start)
    segment_ends = ends if ends[-1] == num_positions else np.append(ends, num_positions)
    sizes = columns.pop("set_sizes")
    kept = [rollouts[number].keep_ids for number in members] if options.keep_set_replay else []
    return Microbatch(
        **columns,
        segment_ends=segment_ends.astype(np.int32),
        keep_ids=np.concatenate([np.zeros(0, dtype=np.int32), *kept]),
        keep_offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]),
        full_rows=columns["loss_mask"] & (sizes == 0),
        num_padding=num_positions - sum(lengths),
    )


def _blank(num_positions: int, options: AssemblyOptions) -> dict[str, np.ndarray | None]:
    """All arrays over positions as padding has them."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(num_positions, value, dtype=dtype)

    routes = None
    if options.replays_routes:
        shape = (num_positions, len(options.moe_layers), options.contract.experts_per_token)
        routes = np.full(shape, np.iinfo(options.route_dtype).max, dtype=options.route_dtype)
    return {
        "tokens": full(0, np.int64), "positions": full(0, np.int64), "targets": full(0, np.int64), "loss_mask": full(False, np.bool_),
        "singleton": full(False, np.bool_), "temperature": full(1, np.float32), "rollout_logprobs": full(0, np.float32),
        "advantages": full(0, np.float32), "staleness": full(0, np.int32), "sequence": full(-1, np.int32), "completion_index": full(-1, np.int32),
        "set_sizes": full(0, np.int64), "routed_experts": routes, "route_mask": None if routes is None else full(False, np.bool_),
    }  # fmt: skip


def _write_sequence(columns: dict[str, np.ndarray | None], r: Rollout, start: int) -> None:
    """What the model reads: tokens, their places, their experts."""
    prompt_end, end = start + len(r.prompt_ids), start + r.num_tokens
    columns["tokens"][start:prompt_end] = r.prompt_ids
    columns["tokens"][prompt_end:end] = r.completion_ids
    columns["positions"][start:end] = np.arange(r.num_tokens)
    if columns["routed_experts"] is not None:
        columns["routed_experts"][start : end - 1] = r.routed_experts
        columns["route_mask"][start : end - 1] = True


def _write_targets(columns: dict[str, np.ndarray | None], r: Rollout, start: int, step: int, keep_set_replay: bool) -> None:
    """What the loss reads: completion token c is predicted one position before its own, at start + P - 1 + c."""
    first = start + len(r.prompt_ids) - 1
    place = slice(first, first + len(r.completion_ids))
    loss = r.loss_mask
    columns["loss_mask"][place] = loss
    columns["singleton"][place] = r.singletons
    columns["targets"][place] = np.where(loss, r.completion_ids, 0)
    columns["temperature"][place] = np.where(loss, r.sampling.temperature, 1.0)
    columns["rollout_logprobs"][place] = np.where(loss, r.logprobs, 0.0)
    columns["staleness"][place] = np.where(loss, step - r.policy_versions, 0)
    columns["completion_index"][place] = np.where(loss, np.arange(len(loss)), -1)
    if keep_set_replay:
        columns["set_sizes"][place] = r.set_sizes


def _padding(ends: np.ndarray, lengths: Sequence[int], num_positions: int) -> list[tuple[int, int, int]]:
    """(start, end, first place within its segment) of each run of padding."""
    tails = [(int(start) + length, int(end), length) for start, end, length in zip(ends, ends[1:], lengths)]
    return [*tails, (int(ends[-1]), num_positions, 0)]
