"""What Megatron-Core adds to PyTorch's parameters, for the type checker: Megatron sets and reads plain attributes."""

from typing import Protocol, cast

import torch
from torch import Tensor


class MegatronAttributes(Protocol):
    """Attributes of a parameter that Megatron looks at. It has only those that somebody set."""

    main_grad: Tensor
    """fp32, of the parameter's shape: the gradient, in the buffer that data-parallel ranks reduce. Set by Megatron's DDP."""
    allreduce: bool
    """False: an expert's, reduced over the expert data-parallel group."""
    sequence_parallel: bool
    """The gradient is summed over the tensor-parallel group, since each rank sees its own slice of the tokens."""
    shared: bool
    """A copy: Megatron's gradient norm leaves it out."""
    nvfp4_amax: Tensor
    """f32 [1]: the largest magnitude of all that share the weight's NVFP4 global scale. Set by NativeQuantiser, read by the
    quantiser that Transformer Engine's module has for this weight."""


def megatron_attributes(parameter: torch.nn.Parameter) -> MegatronAttributes:
    """The same object, typed as Megatron sees it."""
    return cast(MegatronAttributes, parameter)
