"""A model's tensors on their way to the servers, those of a selection as NVFP4, under ModelOpt's names."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.precision.checkpoint import ModelOpt

_WIRE = ModelOpt()


def packed_specs(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of what the tensor `name` (MODULE.weight) of [outputs, inputs] becomes."""
    return _WIRE.specs(name, shape)


def quantised_stream(
    tensors: Iterable[tuple[str, Tensor | None]], group_of: Mapping[str, str], amaxes: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """`tensors` by Hugging Face names, each quantised one as its packed tensors. None (on a rank that only gathers) stays None.

    group_of: of the quantised tensors, as Selection has it. amaxes: f32 [], by group.
    """
    for name, tensor in tensors:
        if name not in group_of:
            yield name, tensor
        elif tensor is None:
            yield from ((part, None) for part, _, _ in packed_specs(name, (0, 0)))
        else:
            yield from _WIRE.tensors(name, tensor, amaxes[group_of[name]].to(tensor.device)).items()
