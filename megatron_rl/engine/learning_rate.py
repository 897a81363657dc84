"""The learning rate of each step."""

import math

from megatron_rl.config.sections import Optimizer


def learning_rate(section: Optimizer, step: int, total_steps: int) -> float:
    """A linear warm-up, then the decay to the minimum, which the last step reaches.

    A function of the step alone: a resumed run needs no state for it, and cannot take a step of the schedule twice.

    Args:
        section: The run's optimizer section.
        step: Number of the step, from 0.
        total_steps: Steps of the run.
    """
    peak, low, warmup = section.learning_rate, section.min_learning_rate, section.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if section.decay == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    share = 1.0 - progress if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return low + (peak - low) * share
