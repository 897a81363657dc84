"""From finished groups to a step plan, and a step plan split into the parts of several optimizer updates."""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_rl.batching.advantages import ADVANTAGES
from megatron_rl.records import GroupResult, PlanEntry, RolloutSummary, StepPlan


def build_step(step: int, groups: Sequence[GroupResult], advantage: str) -> StepPlan:
    """The plan of a step.

    Args:
        step: That consumes it.
        groups: Complete ones; the entries keep their order.
        advantage: A key of ADVANTAGES.
    """
    relative_to_group = ADVANTAGES[advantage]
    entries = []
    for group in groups:
        advantages = relative_to_group(np.array([r.reward for r in group.rollouts]))
        entries += [_entry(group, r, float(a)) for r, a in zip(group.rollouts, advantages, strict=True)]
    return StepPlan(step=step, entries=tuple(entries), summary=summarise(step, groups))


def build_probe(version: int, groups: Sequence[GroupResult]) -> StepPlan:
    """A plan of probe rollouts, which are scored at `version` and not trained on: its advantages are 0."""
    entries = tuple(_entry(group, r, 0.0) for group in groups for r in group.rollouts)
    return StepPlan(step=version, entries=entries, summary=summarise(version, groups))


def split_step(plan: StepPlan, parts: int) -> list[StepPlan]:
    """Split a plan into `parts` plans of consecutive entries, each with its own denominators."""
    bounds = np.linspace(0, len(plan.entries), parts + 1).round().astype(int)
    return [StepPlan(step=plan.step, entries=plan.entries[a:b]) for a, b in itertools.pairwise(bounds)]


def summarise(step: int, groups: Sequence[GroupResult]) -> dict[str, float]:
    """Measure a batch from what the orchestrator knows of it: finite numbers, by the names of the metrics' catalogue.

    A rollout's age is that of its oldest token, in versions: staleness_mean is over rollouts, an upper bound of the tokens' mean.
    None of the names is one that the trainer measures, since both are written to one row.

    Args:
        step: The step that the batch is for: ages count from it.
        groups: Groups of the batch.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    if not rollouts:
        return {"num_groups": float(len(groups)), "num_rollouts": 0.0, "num_tokens": 0.0, "num_loss_tokens": 0.0}
    rewards = np.array([r.reward for r in rollouts])
    completion = np.array([r.num_completion_tokens for r in rollouts])
    tokens = completion + np.array([r.num_prompt_tokens for r in rollouts])
    loss_tokens = sum(r.num_loss_tokens for r in rollouts)
    age = step - np.array([r.min_version for r in rollouts])
    summary = {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(),
        "equal_reward_share": np.mean([len({r.reward for r in group.rollouts}) == 1 for group in groups if group.rollouts]),
        "num_singletons": sum(r.num_singletons for r in rollouts),
        "keep_set_coverage": sum(r.num_with_keep_set for r in rollouts) / max(1, loss_tokens),
        "keep_set_size_mean": sum(r.num_keep_ids for r in rollouts) / max(1, sum(r.num_with_keep_set for r in rollouts)),
        "routing_coverage": sum(r.num_with_routes for r in rollouts) / max(1, int(tokens.sum()) - len(rollouts)),
        "staleness_mean": age.mean(),
        "staleness_max": age.max(),
        "completion_tokens_mean": completion.mean(),
        "completion_tokens_max": completion.max(),
        "cut_off_share": np.mean([r.finish_reason == "length" for r in rollouts]),
        "num_groups": len(groups),
        "num_rollouts": len(rollouts),
        "num_tokens": tokens.sum(),
        "num_loss_tokens": loss_tokens,
    }
    return {name: float(value) for name, value in summary.items()}


def _entry(group: GroupResult, r: RolloutSummary, advantage: float) -> PlanEntry:
    return PlanEntry(
        uid=r.uid,
        prompt_index=group.prompt_index,
        file=r.file,
        index=r.index,
        num_tokens=r.num_prompt_tokens + r.num_completion_tokens,
        num_loss_tokens=r.num_loss_tokens,
        advantage=advantage,
    )
