"""The definition of one step of Muon, for one logical matrix in float64: every layout is compared with it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.optim.newton_schulz import orthogonalise, update_scale


@dataclass(frozen=True)
class MuonSettings:
    """Settings of Muon: the same for all matrices and steps of a run."""

    momentum: float = 0.95
    newton_schulz_steps: int = 5
    newton_schulz_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class MuonRates:
    """Learning rate and weight decay of one step."""

    learning_rate: float
    weight_decay: float


def reference_step(
    weight: Tensor, momentum: Tensor, gradient: Tensor, settings: MuonSettings, rates: MuonRates
) -> tuple[Tensor, Tensor]:
    """One step with Nesterov momentum and decoupled weight decay.

    Args:
        weight: [R, C], a logical matrix.
        momentum: [R, C].
        gradient: [R, C].
        settings: Settings of the run.
        rates: Rates of the step.

    Returns:
        The weight and the momentum after the step, float64 [R, C].
    """
    weight, momentum, gradient = (tensor.double() for tensor in (weight, momentum, gradient))
    momentum = settings.momentum * momentum + gradient
    direction = gradient + settings.momentum * momentum
    update = update_scale(*weight.shape) * orthogonalise(direction, settings.newton_schulz_steps)
    return weight - rates.learning_rate * (update + rates.weight_decay * weight), momentum
