"""Run by test_triton_kernels.py, in a process where TRITON_INTERPRET=1 was set before Triton was imported."""

import os

import pytest
import torch

from megatron_rl.keep_set import cpu_kernels, operation, triton_kernels
from tests.unit.keep_set.cases import make_case, reference, relative_difference
from tests.unit.keep_set.test_operation import run

assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("width", [1, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_as_the_cpu_kernels(width, dtype):
    generator = torch.Generator().manual_seed(width)
    sizes = torch.tensor([0, 3, 0, 40, 1, 0])  # a bag longer than a block; empty bags at both ends
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    left = torch.randn(len(sizes), width, generator=generator).to(dtype)
    table = torch.randn(30, width, generator=generator).to(dtype)
    index = torch.randint(30, (44,), generator=generator).int()
    coefficients = torch.randn(44, generator=generator).to(torch.promote_types(dtype, torch.float32))
    for name, arguments in (("pair_dots", (left,)), ("weighted_sums", (coefficients,))):
        got, wanted = (getattr(module, name)(*arguments, table, index, offsets) for module in (triton_kernels, cpu_kernels))
        assert got.dtype == wanted.dtype and relative_difference(got, wanted) < 1e-6, (
            name
        )  # fp32 sums of 200 terms in another order


def test_no_pair_and_no_bag():
    none, table = torch.zeros(0, dtype=torch.int32), torch.ones(3, 4)
    assert triton_kernels.pair_dots(torch.ones(2, 4), table, none, torch.zeros(3).int()).shape == (0,)
    assert not triton_kernels.weighted_sums(torch.zeros(0), table, none, torch.zeros(3).int()).any()
    assert triton_kernels.weighted_sums(torch.zeros(0), table, none, torch.zeros(1).int()).shape == (0, 4)


def test_the_operation_on_them(monkeypatch):
    monkeypatch.setattr(operation, "_kernels", lambda tensor: triton_kernels)
    case = make_case(1, full=0.1)
    got, wanted = run(case, with_entropy=True), reference(case, with_entropy=True)
    assert all(relative_difference(tensor, wanted[name]) < 2e-5 for name, tensor in got.items())
