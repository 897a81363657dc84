"""A model's tensors on their way out, those of a selection as NVFP4."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.precision.nvfp4 import BLOCK, Nvfp4, quantise

WEIGHT, BLOCK_SCALES, GLOBAL_SCALE = "weight", "weight_scale", "weight_scale_2"
"""ModelOpt's names, which also travel to the servers."""


def packed_specs(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of what the tensor `name` (MODULE.weight) of [outputs, inputs] becomes."""
    module, (outputs, inputs) = name.removesuffix(WEIGHT), shape
    return [
        (module + WEIGHT, (outputs, inputs // 2), torch.uint8),
        (module + BLOCK_SCALES, (outputs, inputs // BLOCK), torch.float8_e4m3fn),
        (module + GLOBAL_SCALE, (), torch.float32),
    ]


def packed_tensors(name: str, quantised: Nvfp4) -> list[tuple[str, Tensor]]:
    """The tensors that `packed_specs` announces."""
    module = name.removesuffix(WEIGHT)
    return [
        (module + WEIGHT, quantised.packed),
        (module + BLOCK_SCALES, quantised.block_scales),
        (module + GLOBAL_SCALE, quantised.global_scale),
    ]


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
            yield from packed_tensors(name, quantise(tensor, amaxes[group_of[name]].to(tensor.device)))
