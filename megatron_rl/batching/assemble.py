"""From a step plan to the microbatches of one rank: pack, read its own rollouts, check, collate."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.batching.collate import Member, collate
from megatron_rl.batching.microbatch import Microbatch
from megatron_rl.batching.options import AssemblyOptions
from megatron_rl.batching.packing import alignment_of, pack
from megatron_rl.batching.routes import cut_routes, shift_routes
from megatron_rl.batching.spool import Spool
from megatron_rl.batching.supervised import SupervisedPlan, as_rollout
from megatron_rl.records import ContractError, Payload, PayloadError, PlanEntry, Rollout, StepPlan, check_rollout
from megatron_rl.topology import Layout, RankCoords


def microbatches_for(
    plan: StepPlan, spool: Spool, layout: Layout, coords: RankCoords, options: AssemblyOptions
) -> list[Microbatch]:
    """Assemble the microbatches of one rank, in order; every data-parallel rank gets the same number.

    Args:
        plan: Plan of the step, or of one of its updates.
        spool: With the plan's payloads.
        layout: The parallelism layout of the run.
        coords: Coordinates of this rank in it.
        options: What the microbatches hold.

    Raises:
        PayloadError: A file is missing, incomplete or not what the plan says.
        ContractError: A record breaks its contract.
        PackingError: A sequence fits no microbatch.
    """
    packing = _packing([e.num_tokens for e in plan.entries], layout, coords, options)
    read = _Reader(plan, spool, options)
    # One microbatch after the other: of a record's routes, no more than this rank's own tokens' stay in memory.
    return [
        _collate(
            [Member(n, read(plan.entries[n]), plan.entries[n].advantage) for n in numbers], plan.step, layout, coords, options
        )
        for numbers in packing
    ]


def supervised_microbatches(
    plan: SupervisedPlan, layout: Layout, coords: RankCoords, options: AssemblyOptions
) -> list[Microbatch]:
    """`microbatches_for` for reference solutions: the loss is on their tokens, over the full vocabulary, with advantage 1.

    Raises:
        ContractError: A prompt or solution is empty, or an id is outside the vocabulary.
        PackingError: A sequence fits no microbatch.
    """
    plain = replace(options, routing_replay=False, keep_set_replay=False)
    packing = _packing([e.num_tokens for e in plan.examples], layout, coords, plain)
    members = {}
    for number in (n for numbers in packing for n in numbers):
        rollout = as_rollout(plan.examples[number], plan.step, number)
        check_rollout(rollout, plain.readable_contract)
        members[number] = Member(number, rollout, advantage=1.0)
    return [_collate([members[n] for n in numbers], plan.step, layout, coords, plain) for numbers in packing]


def _packing(lengths: Sequence[int], layout: Layout, coords: RankCoords, options: AssemblyOptions) -> list[list[int]]:
    multiple = layout.pp if layout.vpp > 1 else 1  # Megatron's interleaved schedule asks for a multiple of the stages
    return pack(lengths, num_ranks=layout.dp, max_tokens=options.max_tokens, microbatch_multiple=multiple)[coords.dp]


def _collate(members: Sequence[Member], step: int, layout: Layout, coords: RankCoords, options: AssemblyOptions) -> Microbatch:
    collated = collate(members, step, alignment_of(layout, options.sequence_parallel, options.rank_multiple), options)
    shifted = shift_routes(collated, options.route_shift)
    return cut_routes(shifted, layout, coords, sequence_parallel=options.sequence_parallel)


class _Reader:
    """Reads the rollouts of a plan's entries and checks them against contract and plan; opens each file once."""

    def __init__(self, plan: StepPlan, spool: Spool, options: AssemblyOptions) -> None:
        self._plan, self._spool, self._options = plan, spool, options
        self._payloads: dict[str, Payload] = {}

    def __call__(self, entry: PlanEntry) -> Rollout:
        if entry.file not in self._payloads:
            self._payloads[entry.file] = self._spool.payload(entry.file)
        payload, options = self._payloads[entry.file], self._options
        rollout = payload.rollout(entry.index, options.moe_layers if options.replays_routes else ())
        _check_against_plan(rollout, entry, payload, self._plan.step)
        check_rollout(rollout, options.readable_contract)
        return rollout


def _check_against_plan(rollout: Rollout, entry: PlanEntry, payload: Payload, step: int) -> None:
    planned = (entry.uid, entry.num_tokens, entry.num_loss_tokens)
    found = (rollout.uid, rollout.num_tokens, int(rollout.loss_mask.sum()))
    if found != planned:
        raise PayloadError(
            f"{payload.path}: record {entry.index} is (uid, tokens, loss tokens) {found}, the plan of step {step} says {planned}"
        )
    newest = int(rollout.policy_versions.argmax())
    version = int(rollout.policy_versions[newest])
    if version > step:
        rule = f"no token is newer than the step that consumes it ({step})"
        raise ContractError(rollout=rollout.uid, token=newest, value=f"policy version {version}", rule=rule)
