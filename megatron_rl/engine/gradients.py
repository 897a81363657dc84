"""The check of a step's gradients before they change the weights."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.engine.megatron_types import megatron_attributes
from megatron_rl.errors import RunError

_NAMES_SHOWN = 8


class NonFiniteGradientError(RunError, RuntimeError):
    """A step's gradients hold NaN or infinity: no update is made, and the message names the step and the parameters."""


def check_gradients(models: Sequence[DistributedDataParallel], names: Mapping[torch.nn.Parameter, str], step: int) -> None:
    """Look for NaN and infinity in the reduced gradients; a collective.

    Megatron would continue with NaN weights (bf16, fp32), or skip the step.

    Args:
        models: This rank's chunks, wrapped for training.
        names: Global names of their parameters.
        step: Number of the step, for the message.

    Raises:
        NonFiniteGradientError: On all ranks, if any of them holds such a gradient.
    """
    # A sum that overflows is worth the exact look as well.
    sums = [buffer.grad_data.sum() for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    suspect = torch.stack([~torch.isfinite(value) for value in sums]).any().float()
    dist.all_reduce(suspect, op=dist.ReduceOp.MAX)
    if not suspect:
        return
    found = [name for parameter, name in names.items() if not torch.isfinite(megatron_attributes(parameter).main_grad).all()]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, found)
    bad = sorted({name for part in everywhere for name in part})
    if bad:
        more = f" and {len(bad) - _NAMES_SHOWN} more" if len(bad) > _NAMES_SHOWN else ""
        raise NonFiniteGradientError(
            f"step {step}: gradients are not finite in {', '.join(bad[:_NAMES_SHOWN])}{more}; "
            "no update was made, the weights are unchanged"
        )
