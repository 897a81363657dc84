"""The operation on a GPU: Triton kernels on the pair route, cuBLAS on the dense one. Skipped without a GPU."""

import dataclasses

import pytest
import torch

from megatron_rl.keep_set import keep_set_log_probs, shard_plan
from tests.unit.keep_set.cases import VALUE_TOLERANCE, Case, make_case, reference, relative_difference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# bf16: the dense route multiplies gradients of logits that were rounded to bf16 (2^-9 each)
GRADIENT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ROUTES = {"by cost": shard_plan.GPU_COSTS, "pairs": shard_plan.RouteCosts(1e9, 1e9), "dense": shard_plan.RouteCosts(0.0, 0.0)}


def run(case: Case, *, sets_on_cpu: bool, fused: bool = False) -> dict[str, torch.Tensor]:
    hidden, weight = (tensor.cuda().requires_grad_() for tensor in (case.hidden, case.weight))
    if fused:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    sets = case.keep_sets
    if not sets_on_cpu:
        sets = type(sets)(*(getattr(sets, field.name).cuda() for field in dataclasses.fields(sets)))
    temperature = case.temperature.cuda()
    out = keep_set_log_probs(hidden, weight, sets, temperature=temperature, vocab_size=case.vocab_size, entropy_has_gradient=True)
    ((out.log_probs * case.upstream.cuda()).sum() + (out.entropy * case.upstream_entropy.cuda()).sum()).backward()
    d_weight = weight.main_grad if fused else weight.grad
    return {"log_probs": out.log_probs.detach(), "entropy": out.entropy.detach(), "d_hidden": hidden.grad, "d_weight": d_weight}


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    monkeypatch.setattr(shard_plan, "GPU_COSTS", ROUTES[request.param])
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sets_on_cpu", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_gradients_are_the_references(dtype, sets_on_cpu, fused, route, report):
    case = make_case(
        1, dtype=dtype, num_tokens=96, vocab_size=400, num_rows=408, width=200, full=0.2, sizes=(1, 1, 2, 9, 60, 300)
    )
    got, wanted = run(case, sets_on_cpu=sets_on_cpu, fused=fused), reference(case, with_entropy=True)
    for name, tensor in got.items():
        tolerance = (GRADIENT_TOLERANCE if name.startswith("d_") else VALUE_TOLERANCE)[dtype]
        difference = relative_difference(tensor, wanted[name])
        report(**{f"{name}, {str(dtype).removeprefix('torch.')}": float(difference)})
        assert difference < tolerance, name


def test_same_inputs_same_bits(route):
    case = make_case(
        2, dtype=torch.bfloat16, num_tokens=512, vocab_size=1000, num_rows=1024, width=256, sizes=(1, 4, 200), full=0.1
    )
    first = run(case, sets_on_cpu=True)
    for _ in range(3):
        for name, tensor in run(case, sets_on_cpu=True).items():
            assert torch.equal(tensor, first[name]), name
