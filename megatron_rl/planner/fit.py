"""Fits the factors of a machine, so that predictions agree with measurements."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from megatron_rl.planner.counts import ParameterCounts
from megatron_rl.planner.machine import Machine
from megatron_rl.planner.measured_ranks import RankMeasurement
from megatron_rl.planner.memory import most_loaded
from megatron_rl.planner.step_time import step_time
from megatron_rl.planner.workload import GIB, Candidate, Workload

T = TypeVar("T")

SEQUENCE = 256
"""Tokens of each measured sequence; half of them are the response."""


@dataclass(frozen=True)
class Case:
    """One layout to run, on at most two ranks."""

    candidate: Candidate
    num_sequences: int
    fits: bool
    """Whether the fit uses the case; the others are held out for the comparison."""

    def work(self) -> Workload:
        """The training step that the case runs."""
        half = SEQUENCE / 2
        return Workload(
            SEQUENCE,
            half,
            half,
            self.num_sequences,
            1,
            parameter_bytes=4,
            scoring_passes=0,
            truncated=False,
            replays_routes=False,
            rollout_weights="fp32",
            imbalance=1.0,
            unevenness=0.0,
            bucket_bytes=0,
        )


Measured = Sequence[tuple[Case, RankMeasurement]]
_TIME_FACTORS = ("matmul_efficiency", "hbm_gb_s", "layer_overhead_us", "nvlink_gb_s", "step_overhead_s", "cores")
"""matmul_efficiency stands for all three efficiencies of matrix products: the cases are too few to separate them."""
_ACTIVATION_FACTORS = np.arange(0.5, 6.0, 0.02)
_PULL = 1e-3
"""Weight of a factor's squared logarithm in the error. Six cases do not determine all factors; this keeps the others near their
starting values."""
_ROUNDS = 60
_FURTHEST = 8.0
"""First step of a factor; after each round without progress the step is replaced by its square root."""


def predicted(counts: ParameterCounts, machine: Machine, case: Case) -> tuple[float, float]:
    """Predicts one case.

    Args:
        counts: Parameters of the measured model.
        machine: The machine.
        case: The layout and its workload.

    Returns:
        Seconds of a step, and bytes of the rank that uses most memory.
    """
    work = case.work()
    return step_time(counts, work, case.candidate, machine).total, most_loaded(counts, work, case.candidate, machine).total


def fitted(counts: ParameterCounts, machine: Machine, measured: Measured) -> Machine:
    """Fits the factors of memory and of time to the measurements.

    Args:
        counts: Parameters of the measured model.
        machine: The machine with the starting values.
        measured: Cases with what was measured.

    Returns:
        The machine with the fitted factors.
    """
    return fitted_time(counts, fitted_memory(counts, machine, measured), measured)


def fitted_memory(counts: ParameterCounts, machine: Machine, measured: Measured) -> Machine:
    """Fits what a process holds before it has a model, and the factor on the counted bytes of activations.

    The best of a fine grid of factors, each with its least-squares base. Errors are relative to the measured bytes.

    Args:
        counts: Parameters of the measured model.
        machine: The machine with the starting values.
        measured: Cases with what was measured.

    Returns:
        The machine with fitted reserved_gib and activation_factor.
    """
    sizes = np.array([found.peak_bytes for _, found in measured], dtype=float)
    tries = []
    for factor in _ACTIVATION_FACTORS:
        tried = replace(machine, reserved_gib=0.0, activation_factor=float(factor))
        rest = sizes - [predicted(counts, tried, case)[1] for case, _ in measured]
        base = max(0.0, float((rest / sizes**2).sum() / (1 / sizes**2).sum()))
        tries.append((float((((rest - base) / sizes) ** 2).sum()), replace(tried, reserved_gib=base / GIB)))
    return min(tries, key=lambda pair: pair[0])[1]


def fitted_time(counts: ParameterCounts, machine: Machine, measured: Measured) -> Machine:
    """Fits the time factors by least squares on the logarithms of predicted over measured seconds.

    Args:
        counts: Parameters of the measured model.
        machine: The machine with the starting values.
        measured: Cases with what was measured.

    Returns:
        The machine with the fitted factors.
    """
    given = machine

    def error(candidate: Machine) -> float:
        ratios = [predicted(counts, candidate, case)[0] / found.step_s for case, found in measured]
        moved = [getattr(candidate, name) / getattr(given, name) for name in _TIME_FACTORS]
        return sum(math.log(ratio) ** 2 for ratio in ratios) + _PULL * sum(math.log(factor) ** 2 for factor in moved)

    return coordinate_descent(machine, _TIME_FACTORS, _scaled, error)


def coordinate_descent(
    start: T, names: Sequence[str], scaled: Callable[[T, str, float], T | None], error: Callable[[T], float]
) -> T:
    """Minimises an error by scaling one factor after the other up and down, in steps that become smaller.

    Args:
        start: Where the search begins.
        names: The factors, in the order in which they are tried.
        scaled: Called as scaled(state, name, by); returns None if the factor would leave its range.
        error: The error to minimise.

    Returns:
        The state with the lowest error that was found.
    """
    best, lowest, step = start, error(start), _FURTHEST
    for _ in range(_ROUNDS):
        before = lowest
        for name in names:
            for by in (step, 1 / step):
                tried = scaled(best, name, by)
                if tried is not None and (found := error(tried)) < lowest:
                    best, lowest = tried, found
                    break
        if before - lowest < 1e-6:
            step = math.sqrt(step)
        if step < 1.005:
            break
    return best


def _scaled(machine: Machine, name: str, factor: float) -> Machine | None:
    """The machine with one factor scaled; None if the factor would leave its range."""
    if name == "matmul_efficiency":
        names = ("matmul_efficiency", "expert_efficiency", "attention_efficiency")
        return replace(machine, **{each: getattr(machine, each) * factor for each in names})
    value = getattr(machine, name) * factor
    if name == "cores" and not 1.0 <= value <= 2.0:  # two ranks share one core at worst, and have one each at best
        return None
    return replace(machine, **{name: value})
