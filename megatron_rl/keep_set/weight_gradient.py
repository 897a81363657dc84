"""Where the gradient of the output weight goes, and what autograd gets for it."""

from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from megatron_rl.keep_set.accumulate import accumulation_dtype, add_product


class WeightGradient:
    """Adds to Megatron's `weight.main_grad` in place where it exists, else to a separate dense gradient.

    Megatron's protocol (its own fused linear layer follows the same one): a parameter of its DDP has `grad_added_to_main_grad`;
    if set, the backward hook does not add what autograd delivers. A gradient has to be delivered all the same, or the
    hook does not run and the bucket is never reduced: an uninitialised tensor, never read. `zero_out_wgrad` (an embedding tied
    to the output layer) means that autograd will add the embedding's gradient to it and that the hook will add the sum: zeros
    then.

    Args:
        weight: [rows, H], this rank's vocabulary rows.
        is_dense: Rows may be added to more than once, so that a bf16 sum needs a wider buffer.
    """

    def __init__(self, weight: Tensor, *, is_dense: bool) -> None:
        self.weight = weight
        main_grad = getattr(weight, "main_grad", None)
        self.is_fused = main_grad is not None
        if main_grad is None:
            wide = accumulation_dtype(weight) if is_dense else weight.dtype
            main_grad = torch.zeros_like(weight, dtype=wide, requires_grad=False)
        self.target = main_grad

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add values to some rows.

        Args:
            rows: int [n], distinct, so that the order of adding does not matter.
            values: fp32 [n, H].
        """
        if self.target.dtype == values.dtype:
            self.target.index_add_(0, rows, values)
        else:
            self.target[rows] = (self.target[rows] + values).to(self.target.dtype)

    def add_product(self, first_row: int, left: Tensor, right: Tensor) -> None:
        """Add left^T right to the k rows from `first_row`.

        Args:
            first_row: Number of the first of the k rows.
            left: fp32 [N, k].
            right: [N, H].
        """
        add_product(self.target[first_row : first_row + left.shape[1]], left.t(), right)

    def for_autograd(self) -> Tensor | None:
        """What backward returns for the weight."""
        if not self.is_fused:
            return self.target.to(self.weight.dtype)
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        if getattr(self.weight, "zero_out_wgrad", False):
            return torch.zeros_like(self.weight, requires_grad=False)
        return _untouched_like(self.weight)


def _untouched_like(weight: Tensor) -> Tensor:
    """Uninitialised memory that is not filled either: deterministic mode would write NaN into all [V, H] of it."""
    deterministic: Any = torch.utils.deterministic  # its attributes are properties of a module, which the type checker cannot see
    fill = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        return torch.empty_like(weight, requires_grad=False)
    finally:
        deterministic.fill_uninitialized_memory = fill
