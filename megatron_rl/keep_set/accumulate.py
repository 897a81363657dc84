"""Sums wider than their inputs: products of the training dtype, accumulated in fp32."""

import torch
from torch import Tensor


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 tensors (a test's)."""
    return torch.promote_types(tensor.dtype, torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply in accumulation dtype.

    A GPU multiplies bf16 by bf16 into fp32 (a wider side is rounded first, as gradients of logits are in any bf16 training). A
    CPU's product would round its result to bf16, so there both sides are widened.

    Args:
        left: [n, k].
        right: [k, m].

    Returns:
        [n, m], fp32 (fp64 if a side is).
    """
    dtype = torch.promote_types(accumulation_dtype(left), accumulation_dtype(right))
    if left.dtype == right.dtype == dtype:
        return left @ right
    if left.is_cuda:
        narrow = left.dtype if left.dtype != dtype else right.dtype
        return torch.mm(left.to(narrow), right.to(narrow), out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left @ right in place, added in accumulation dtype and rounded to the target's dtype once.

    Args:
        target: [n, m].
        left: [n, k].
        right: [k, m].
    """
    if target.dtype == left.dtype == right.dtype == accumulation_dtype(target):
        target.addmm_(left, right)
    else:
        target.copy_(target + product(left, right))
