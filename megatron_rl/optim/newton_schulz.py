"""The Newton-Schulz iteration: a matrix's nearest orthogonal one, approximately, by matrix products alone; for many at once."""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""X <- a X + b (X X^T) X + c (X X^T)^2 X brings singular values from (0, 1] to about 1, within .3, in five steps (Jordan et al.,
"Muon: An optimizer for hidden layers in neural networks", 2024)."""

SMALLEST_NORM = 1e-7
"""Matrices are divided by their Frobenius norm, or by this: a zero gradient stays zero."""


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalise each matrix.

    Args:
        matrices: [..., R, C]. In fp32 and float64 the iteration is exact but for rounding.
        steps: Iterations.

    Returns:
        [..., R, C] of the same dtype, singular values about 1.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))  # the Gram matrix below is the small one
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        # Sums go into the products: separate passes over the matrices took a third of the time.
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)


def flops(rows: int, columns: int, steps: int) -> int:
    """Multiplications and additions of `orthogonalise` for one matrix."""
    small, large = sorted((rows, columns))
    return steps * (4 * small * small * large + 2 * small**3)


def update_scale(rows: int, columns: int) -> float:
    """Factor that brings the update's root mean square to AdamW's, so that the same learning rates serve both.

    Moonlight, arXiv 2502.16982.
    """
    return 0.2 * max(rows, columns) ** 0.5
