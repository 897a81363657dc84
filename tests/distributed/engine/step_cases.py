"""Optimizer steps on the ranks."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.batching.collate import Member
from megatron_rl.engine.engine import Scores
from megatron_rl.engine.gradients import NonFiniteGradientError
from megatron_rl.engine.groups import set_determinism
from megatron_rl.engine.schedule import ScheduleError
from megatron_rl.objective import Denominators, SupervisedLoss
from megatron_rl.records import RaggedIds
from tests.distributed.engine.cases import Run, Setting, copied, laid_out
from tests.distributed.engine.subject import microbatches_of, options_of, weights_of


def without_loss(microbatch: Microbatch) -> Microbatch:
    """The same tokens, none of which counts."""
    nothing = np.zeros_like(microbatch.loss_mask)
    return replace(
        microbatch, loss_mask=nothing, full_rows=nothing, singleton=nothing, targets=np.zeros_like(microbatch.targets),
        keep_sets=RaggedIds.empty(microbatch.num_positions),
    )  # fmt: skip


def gradients_beside_idle_microbatches(rank: int, setting: Setting) -> dict[str, Tensor]:
    """Each rank runs its microbatches and, before and after them, as many of the same tokens without any loss."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        idle = [without_loss(m) for m in run.microbatches]
        run.microbatches = [*idle, *run.microbatches, *idle]
        return run.gradients()


def gradients_with_idle_ranks(rank: int, setting: Setting) -> dict[str, Tensor]:
    """The first data-parallel rank has all loss tokens; the others see the same tokens, none of which counts."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        complete = packed(run, run.members, setting)
        run.microbatches = complete if groups.coords.dp == 0 else [without_loss(m) for m in complete]
        return run.gradients()


def gradients_packed_backwards(rank: int, setting: Setting) -> dict[str, Tensor]:
    """The last sequence first, and the last microbatch first."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        run.microbatches = packed(run, run.members[::-1], setting)[::-1]
        return run.gradients()


def packed(run: Run, members: list[Member], setting: Setting) -> list[Microbatch]:
    """All sequences, as one data-parallel rank would have them."""
    options = options_of(setting.model, moe_layers=run.engine.moe_layers, sequence_parallel=run.config.sequence_parallel)
    alone = replace(setting.layout, world_size=setting.layout.world_size // setting.layout.dp, ep=1, etp=1)
    return microbatches_of(members, alone, replace(run.groups.coords, dp=0), options, max_tokens=setting.max_tokens)


def step_without_loss(rank: int, setting: Setting) -> tuple[dict[str, float], bool]:
    """Metrics of a step without a single loss token on any rank, and whether the weights stayed."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        run.microbatches = [without_loss(m) for m in run.microbatches]
        run.denominators = Denominators(tokens=1, sequences=1)
        before, metrics, after = run.weights(), run.step(), run.weights()
        return metrics, all(torch.equal(after[name], tensor) for name, tensor in before.items())


def uneven_microbatches(rank: int, setting: Setting) -> str:
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        run.microbatches = run.microbatches[:1] * (2 if groups.coords.dp == 1 else 1)
        try:
            run.step()
        except ScheduleError as error:
            return str(error)
    return "nothing"


def broken_weight(rank: int, setting: Setting, name: str) -> tuple[str, bool]:
    """What a step with an infinite weight is refused with, and whether the weights stayed."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        weights = weights_of(setting.model)
        weights[name][0, 0] = float("inf")
        run.engine.load_weights(weights)
        before = run.weights()
        try:
            run.step(7)
        except NonFiniteGradientError as error:
            return str(error), all(torch.equal(tensor, before[key]) for key, tensor in run.weights().items())
    return "nothing", False


def losses_of_steps(rank: int, setting: Setting, count: int) -> list[dict[str, float]]:
    """Metrics of supervised steps on the same sequences."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        run.loss = SupervisedLoss()
        return [run.step(number) for number in range(count)]


def deterministic_steps(rank: int, setting: Setting) -> dict[str, Tensor]:
    set_determinism(True)
    try:
        with laid_out(setting) as groups:
            run = Run(groups, setting, run={"deterministic": True})
            for number in range(3):
                run.step(number)
            return run.weights()
    finally:
        set_determinism(False)


@dataclass(frozen=True)
class References:
    """log-probs of the first microbatch that has loss tokens."""

    at_start: np.ndarray
    trained: np.ndarray
    reference: np.ndarray
    trained_again: np.ndarray
    weights_restored: bool


def reference_policy(rank: int, setting: Setting) -> References:
    with laid_out(setting) as groups:
        run = Run(groups, setting)

        def first(scores: list[Scores]) -> np.ndarray:
            return np.concatenate([s.log_probs for s in scores])

        start = first(run.engine.score(run.microbatches))
        run.engine.keep_reference()
        run.step()
        trained, before = first(run.engine.score(run.microbatches)), run.weights()
        reference = first(run.engine.score_reference(run.microbatches))
        after = run.weights()
        again = first(run.engine.score(run.microbatches))
        return References(
            start, trained, reference, again, all(torch.equal(after[name], tensor) for name, tensor in before.items())
        )


def step_with_old_logprobs(rank: int, setting: Setting, offset: float) -> dict[str, float]:
    """Metrics of a step whose old log-probs are the policy's own minus `offset`: ratios exp(offset)."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        old = [s.log_probs - np.float32(offset) for s in run.engine.score(run.microbatches)]
        metrics = run.engine.train_step(run.microbatches, run.loss, run.denominators, step=0, learning_rate=0.0, old_logprobs=old)
        return {name: metric.value for name, metric in metrics.items() if metric.count}


def round_trip(rank: int, setting: Setting) -> tuple[bool, dict[str, Tensor]]:
    """Whether iterating twice, and the metadata, say the same; the tensors."""
    with laid_out(setting) as groups:
        engine = Run(groups, setting).engine
        source = engine.hf_tensors()
        first, second, names = copied(source), copied(source), [name for name, _ in source]
        described = [(spec.name, spec.shape, spec.torch_dtype) for spec in source.specs]
        agree = all(torch.equal(second[name], tensor) for name, tensor in first.items())
        agree &= not first or [(name, tuple(t.shape), t.dtype) for name, t in first.items()] == described
        return agree and names == [name for name, *_ in described] and len(source) == len(names), first


def sequence_level_step(rank: int, setting: Setting) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and metrics of an objective over complete sequences, with the dense entropy of some tokens."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, objective={"name": "gspo"}, metrics={"entropy_full_tokens": 5})
        return run.gradients(), run.step()


def step_with_an_unpadded_sequence(rank: int, setting: Setting) -> str:
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        first = run.microbatches[0]
        ends = first.segment_ends.copy()
        ends[1] += 1
        run.microbatches[0] = replace(first, segment_ends=ends)
        try:
            run.step()
        except ScheduleError as error:
            return str(error)
    return "nothing"
