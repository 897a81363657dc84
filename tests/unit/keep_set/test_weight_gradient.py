"""Megatron's main_grad protocol: where the weight's gradient goes, and what autograd delivers in its place.

`DataParallel` does to its parameter what Megatron-Core's DistributedDataParallel does (distributed_data_parallel.py, the backward
hook); that the real one behaves so is for the engine's tests.
"""

import pytest
import torch

from megatron_rl.keep_set import dense_route, keep_set_log_probs, weight_gradient
from tests.unit.keep_set.cases import GRADIENT_TOLERANCE, Case, make_case, reference, relative_difference


class DataParallel:
    def __init__(self, weight: torch.Tensor, grad_dtype=torch.float32, tied=False):
        self.weight = torch.nn.Parameter(weight.clone())
        self.weight.main_grad = torch.zeros_like(weight, dtype=grad_dtype)
        self.weight.grad_added_to_main_grad = False
        if tied:
            self.weight.zero_out_wgrad = True
        self.num_delivered = 0
        self.weight.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, weight):
        self.num_delivered += 1
        assert weight.grad is not None
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad)
        weight.grad = None


def log_prob_loss(case: Case, weight, hidden=None) -> torch.Tensor:
    hidden = case.hidden if hidden is None else hidden
    out = keep_set_log_probs(hidden, weight, case.keep_sets, temperature=case.temperature, vocab_size=case.vocab_size)
    return (out.log_probs * case.upstream).sum()


@pytest.mark.parametrize("full", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_two_microbatches_accumulate_into_main_grad(full, dtype, grad_dtype):
    cases = [make_case(seed, dtype=dtype, full=full) for seed in (1, 2)]
    ddp = DataParallel(cases[0].weight, grad_dtype)
    for case in cases:
        case.weight = cases[0].weight
        log_prob_loss(case, ddp.weight).backward()
    wanted = sum(reference(case, with_entropy=False)["d_weight"] for case in cases)
    assert ddp.num_delivered == 2 and ddp.weight.grad_added_to_main_grad
    assert relative_difference(ddp.weight.main_grad, wanted) < GRADIENT_TOLERANCE[grad_dtype]


def test_tied_embedding_keeps_both_gradients():
    case = make_case(3, full=0.1)
    ddp = DataParallel(case.weight, tied=True)
    tokens = case.keep_sets.target_ids
    hidden = torch.nn.functional.embedding(tokens, ddp.weight) + case.hidden
    log_prob_loss(case, ddp.weight, hidden).backward()

    plain = case.weight.clone().requires_grad_()
    log_prob_loss(case, plain, torch.nn.functional.embedding(tokens, plain) + case.hidden).backward()
    assert relative_difference(ddp.weight.main_grad, plain.grad) < GRADIENT_TOLERANCE[torch.float32]
    case.hidden = hidden.detach()
    assert (
        relative_difference(plain.grad, reference(case, with_entropy=False)["d_weight"]) > 1e-2
    )  # the embedding's part is in it


def test_main_grad_without_ddp_is_used_and_nothing_delivered():
    case = make_case(4)
    weight = torch.nn.Parameter(case.weight)
    weight.main_grad = torch.zeros_like(weight.data)
    log_prob_loss(case, weight).backward()
    assert weight.grad is None
    assert (
        relative_difference(weight.main_grad, reference(case, with_entropy=False)["d_weight"]) < GRADIENT_TOLERANCE[torch.float32]
    )


def test_a_microbatch_of_singletons_still_runs_the_hook_and_adds_nothing():
    case = make_case(5, sizes=(1,))
    ddp = DataParallel(case.weight)
    log_prob_loss(case, ddp.weight, case.hidden.requires_grad_()).backward()
    assert ddp.num_delivered == 1 and not ddp.weight.main_grad.any()
    assert case.hidden.grad is not None and not case.hidden.grad.any()


def test_a_frozen_weight_gets_nothing():
    case = make_case(6)
    case.hidden.requires_grad_()
    case.weight.main_grad = torch.zeros_like(case.weight)
    log_prob_loss(case, case.weight).backward()
    assert not case.weight.main_grad.any()
    assert (
        relative_difference(case.hidden.grad, reference(case, with_entropy=False)["d_hidden"]) < GRADIENT_TOLERANCE[torch.float32]
    )


def test_deterministic_mode_neither_refuses_nor_fills_the_delivered_tensor(monkeypatch):
    """Filling it would write [vocabulary, hidden] NaN in each backward. The mode's own flag is as before afterwards."""
    seen = []
    monkeypatch.setattr(
        weight_gradient.torch,
        "empty_like",
        lambda *a, **k: seen.append(torch.utils.deterministic.fill_uninitialized_memory) or a[0],
    )
    case = make_case(7, full=0.1)
    ddp = DataParallel(case.weight)
    torch.use_deterministic_algorithms(True)
    try:
        weight_gradient._untouched_like(case.weight)
        monkeypatch.undo()
        log_prob_loss(case, ddp.weight).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False] and torch.utils.deterministic.fill_uninitialized_memory
    assert (
        relative_difference(ddp.weight.main_grad, reference(case, with_entropy=False)["d_weight"])
        < GRADIENT_TOLERANCE[torch.float32]
    )


def test_a_bf16_gradient_of_many_groups_is_rounded_once(monkeypatch):
    """300 parts of one sign: rounding each sum to bf16 would lose the later ones."""
    monkeypatch.setattr(dense_route, "_TOKENS_AT_ONCE", 1)
    case = make_case(8, dtype=torch.bfloat16, num_tokens=300, vocab_size=6, num_rows=6, width=3, full=1.0, unscored=0.0)
    case.hidden, case.upstream = case.hidden.abs(), torch.ones(300)
    case.keep_sets.target_ids.zero_()
    weight = case.weight.clone().requires_grad_()
    log_prob_loss(case, weight).backward()
    wanted = reference(case, with_entropy=False)["d_weight"]
    assert (
        (weight.grad.double() - wanted) / wanted
    ).abs().max() < 2**-8  # half a unit in the last place, and the rounding of fp32
