"""Megatron's distributed optimizer from inside: its parts, the slices of parameters in them, and how they are saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizers inside: one for the dense parameters, one for experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The PyTorch (or fused) optimizers that the parts wrap."""
    return [part.optimizer for part in parts_of(optimizer) if part.optimizer is not None]


def slice_of(part: Any, parameter: Tensor) -> tuple[Tensor, int, int] | None:
    """The slice of a parameter that this data-parallel rank updates in one part of the optimizer.

    Args:
        part: One of `parts_of`.
        parameter: One of the model's own tensors.

    Returns:
        The flat fp32 tensor, and where it begins and ends in the flattened parameter. None where this part updates nothing of it.
    """
    # A part without any parameter on this rank (a stage without experts) has no such map.
    place = getattr(part, "model_param_group_index_map", {}).get(parameter)
    if place is None:
        return None
    group, number = place
    span = part._get_model_param_range_map(parameter)["param"]
    return part.optimizer.param_groups[group]["params"][number], span.start, span.end


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make zero moments now.

    PyTorch's AdamW makes them at its first step, and Megatron can neither save nor load without them.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        step = {"step": torch.zeros((), dtype=torch.float32)} if isinstance(optimizer, torch.optim.AdamW) else {}
        optimizer.state[parameter] = step | state


def align_step_counts(optimizer: MegatronOptimizer) -> None:
    """Give a part that has no parameter on this rank (a stage without experts) the others' step count; a collective.

    To call before saving and loading: Megatron asks each part for exactly one count, and writes the first rank's.
    """
    adamws = _pytorch_adamws(optimizer)
    if not adamws:
        return
    count = torch.stack([torch.zeros(()), *(state["step"] for part in adamws for state in part.state.values())]).max()
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    for part in adamws:
        if not any(group["params"] for group in part.param_groups):
            cast(dict[Any, Any], part.state)["of no parameter"] = {"step": count.clone()}


def separate_step_counts(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own step count, to call after loading.

    Megatron hands the same count, one tensor, to all parameters, and AdamW would raise it once for each of them.
    """
    for part in _pytorch_adamws(optimizer):
        for state in part.state.values():
            state["step"] = state["step"].clone()


def _pytorch_adamws(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    """None where Transformer Engine or apex brings a fused optimizer."""
    return [part for part in torch_optimizers(optimizer) if isinstance(part, torch.optim.AdamW)]


@contextmanager
def padding_between_buckets() -> Iterator[None]:
    """Put the padding between a buffer's buckets back before Megatron cuts the optimizer's states.

    Megatron gathers the states without that padding, and then cuts them where the parameters are with the padding (0.16.1 and
    0.19.2): everything after the first bucket is saved shifted. A tied embedding on several stages has its own bucket.
    """
    gather = DistributedOptimizer.get_parameter_state_dp_zero

    def with_padding(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> dict | None:
        state = gather(self, *args, **kwargs)
        for number, buffer in enumerate(self.buffers if state else []):
            for tensors in state[number].values():
                tensors.update({name: _spread(flat, buffer) for name, flat in tensors.items() if isinstance(flat, Tensor)})
        return state

    DistributedOptimizer.get_parameter_state_dp_zero = with_padding
    try:
        yield
    finally:
        DistributedOptimizer.get_parameter_state_dp_zero = gather


def _spread(flat: Tensor, buffer: Any) -> Tensor:
    """One state's elements of all buckets, one after the other, moved to where the buckets are in the buffer."""
    if len(buffer.buckets) == 1:
        return flat
    spread = flat.new_zeros(buffer.numel)
    for bucket, part in zip(buffer.buckets, flat.split([bucket.numel_unpadded for bucket in buffer.buckets]), strict=True):
        spread[bucket.offset : bucket.offset + bucket.numel_unpadded] = part
    return spread
