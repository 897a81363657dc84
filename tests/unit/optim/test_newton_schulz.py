"""The iteration: what it does to singular values, to nothing, to tall matrices, to many at once."""

import pytest
import torch

from megatron_rl.optim import MuonRates, MuonSettings, orthogonalise, reference_step
from megatron_rl.optim.newton_schulz import COEFFICIENTS, flops


def random_matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(7, 19), (19, 7), (12, 12)])
def test_singular_values_follow_the_polynomial_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = random_matrix(*shape)
    u, singular, v = torch.linalg.svd(matrix, full_matrices=False)
    values = singular / singular.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    assert torch.allclose(orthogonalise(matrix, 5), u @ torch.diag(values) @ v, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_stays_nothing(dtype: torch.dtype) -> None:
    batch = torch.stack([torch.zeros(5, 9), torch.ones(5, 9)]).to(dtype)
    found = orthogonalise(batch, 5)
    assert not found[0].any() and torch.isfinite(found).all() and found[1].any()


def test_a_batch_is_its_matrices() -> None:
    batch = random_matrix(6, 20, 11)
    for matrix, found in zip(batch, orthogonalise(batch, 5), strict=True):
        assert torch.allclose(found, orthogonalise(matrix, 5), rtol=0, atol=1e-12)


def test_scale_does_not_matter() -> None:
    matrix = random_matrix(8, 30)
    assert torch.allclose(orthogonalise(1e-5 * matrix, 5), orthogonalise(matrix, 5), rtol=0, atol=1e-11)


def test_flops_count_the_three_products_of_a_step() -> None:
    # 3 x 10: 2 * 3*3*10 for the Gram matrix, 2 * 3*3*3 for its square, 2 * 3*3*10 for the last product
    assert flops(3, 10, 5) == flops(10, 3, 5) == 5 * (180 + 54 + 180)


def test_a_step_has_nesterov_momentum_decay_and_the_size_of_adamw() -> None:
    weight, momentum, gradient = (random_matrix(24, 40, seed=seed) for seed in range(3))
    settings, rates = MuonSettings(momentum=0.9), MuonRates(learning_rate=0.1, weight_decay=0.5)
    found, raised = reference_step(weight, momentum, gradient, settings, rates)
    assert torch.allclose(raised, 0.9 * momentum + gradient)
    update = (0.95 * weight - found) / 0.1
    assert torch.allclose(update, 0.2 * 40**0.5 * orthogonalise(gradient + 0.9 * (0.9 * momentum + gradient), 5))
    # 24 singular values of .7 to 1.2: rms = .2 * sqrt(40) * sqrt(24 / (24 * 40)) * about 1
    assert 0.14 < update.square().mean().sqrt() < 0.24


def test_an_expert_without_tokens_goes_on_with_its_momentum() -> None:
    weight, momentum = random_matrix(6, 9), random_matrix(6, 9, seed=1)
    found, decayed = reference_step(weight, momentum, torch.zeros(6, 9), MuonSettings(), MuonRates(0.1, 0.0))
    assert torch.allclose(decayed, 0.95 * momentum)
    assert torch.allclose(weight - found, 0.1 * 0.2 * 3 * orthogonalise(momentum, 5))
