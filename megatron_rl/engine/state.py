"""All that an optimizer step changes on a rank, by name."""

from collections.abc import Iterable, Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


def state_tensors(parameters: Iterable[tuple[str, Tensor]], optimizer: MegatronOptimizer) -> Iterator[tuple[str, Tensor]]:
    """Each of this rank's weights, followed by what its optimizer holds of it: 'NAME', 'NAME exp_avg', 'NAME exp_avg_sq',
    'NAME step' and, where the model is not fp32, 'NAME master'. Views of the state itself; in the order of `parameters`."""
    for name, parameter in parameters:
        yield name, parameter.detach()
        for kind, tensor in _of_optimizer(optimizer, parameter).items():
            yield f"{name} {kind}", tensor.detach()


def _of_optimizer(optimizer: MegatronOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Of the part of a parameter that this data-parallel rank updates; nothing where it updates none of it."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # A part without any parameter on this rank (a stage without experts) has no such map.
        place = getattr(part, "model_param_group_index_map", {}).get(parameter)
        if place is None:
            continue
        group, number = place
        updated = part.optimizer.param_groups[group]["params"][number]
        master = {} if updated.dtype == parameter.dtype else {"master": updated}
        return master | {
            kind: value for kind, value in sorted(part.optimizer.state[updated].items()) if isinstance(value, torch.Tensor)
        }
    return {}
