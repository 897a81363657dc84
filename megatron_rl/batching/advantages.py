"""Group-relative advantages: how much better a rollout did than the others of the same prompt."""

from collections.abc import Callable

import numpy as np


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """Reward minus the group's mean, f64 [n]; exactly 0 where all rewards are equal. rewards: [n]."""
    rewards = np.asarray(rewards, dtype=np.float64)
    if not len(rewards) or rewards.max() == rewards.min():  # the mean of equal numbers can be an ulp off them
        return np.zeros(len(rewards))
    return rewards - rewards.mean()


def group_mean_std(rewards: np.ndarray) -> np.ndarray:
    """`group_mean` over the group's standard deviation (divisor n), f64 [n]; 0 where all rewards are equal. rewards: [n]."""
    centred = group_mean(rewards)
    deviation = np.sqrt(np.mean(centred**2)) if len(centred) else 0.0
    return centred / deviation if deviation > 0 else centred


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"group_mean": group_mean, "group_mean_std": group_mean_std}
"""Advantage functions by the value of objective.advantage."""
