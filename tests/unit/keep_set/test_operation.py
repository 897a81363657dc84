"""The operation in one process on a CPU against the float64 reference. Shards: tests/distributed/keep_set; GPUs: tests/gpu."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_rl.keep_set import KeepSets, TokenKind, entropy_full, keep_set_log_probs, shard_plan
from megatron_rl.records import ContractError, RaggedIds
from tests.unit.keep_set.cases import GRADIENT_TOLERANCE, VALUE_TOLERANCE, Case, make_case, reference, relative_difference

FORCED_ROUTES = {
    "by cost": shard_plan.CPU_COSTS,
    "pairs": shard_plan.RouteCosts(dense_entry=math.inf, dense_row=math.inf),
    "dense": shard_plan.RouteCosts(dense_entry=0.0, dense_row=0.0),
}


@pytest.fixture(params=FORCED_ROUTES)
def route(request, monkeypatch):
    monkeypatch.setattr(shard_plan, "CPU_COSTS", FORCED_ROUTES[request.param])
    return request.param


def run(case: Case, *, with_entropy=False) -> dict[str, torch.Tensor]:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (case.hidden, case.weight))
    out = keep_set_log_probs(
        hidden,
        weight,
        case.keep_sets,
        temperature=case.temperature,
        vocab_size=case.vocab_size,
        entropy_has_gradient=with_entropy,
    )
    loss = (out.log_probs * case.upstream).sum()
    if with_entropy:
        loss = loss + (out.entropy * case.upstream_entropy).sum()
    loss.backward()
    return {
        "log_probs": out.log_probs.detach(),
        "entropy": out.entropy.detach(),
        "d_hidden": hidden.grad,
        "d_weight": weight.grad,
    }


def assert_as_reference(case: Case, **options) -> None:
    got, wanted = run(case, **options), reference(case, with_entropy=options.get("with_entropy", False))
    for name, tensor in got.items():
        tolerance = (GRADIENT_TOLERANCE if name.startswith("d_") else VALUE_TOLERANCE)[case.hidden.dtype]
        assert relative_difference(tensor, wanted[name]) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_the_references(dtype, with_entropy, route):
    assert_as_reference(make_case(1, dtype=dtype, full=0.2, sizes=(1, 1, 2, 3, 7, 20, 50)), with_entropy=with_entropy)


@pytest.mark.parametrize("shape", [(1, 7, 7, 3), (5, 300, 304, 8), (200, 33, 40, 64)])
def test_other_shapes(shape, route):
    num_tokens, vocab_size, num_rows, width = shape
    assert_as_reference(
        make_case(2, num_tokens=num_tokens, vocab_size=vocab_size, num_rows=num_rows, width=width, full=0.1, sizes=(1, 2, 6))
    )


def test_several_chunks_blocks_and_groups_give_the_same(monkeypatch, route):
    from megatron_rl.keep_set import cpu_kernels, dense_route, pair_route

    for module, name, value in (
        (cpu_kernels, "_WIDENED_BYTES", 512), (pair_route, "_SUMS_BYTES", 256), (dense_route, "_CHUNK_BYTES", 1),
        (shard_plan, "_WIDE_PAIRS_AT_ONCE", 100), (dense_route, "_TOKENS_AT_ONCE", 7),
    ):  # fmt: skip
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    for dtype in (torch.float32, torch.bfloat16):
        assert_as_reference(
            make_case(3, dtype=dtype, num_tokens=40, vocab_size=500, num_rows=512, full=0.2, sizes=(1, 2, 30, 400))
        )


def test_by_hand():
    """Logits [2, .5, 1, -1, 0], set {0, 2, 4}, target 2; the whole vocabulary beside it."""
    weight = torch.tensor([[2.0], [0.5], [1.0], [-1.0], [0.0]])
    sets = KeepSets(
        torch.tensor([2, 2]), torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([4, 2, 0]).int(), torch.tensor([0, 3, 3])
    )
    out = keep_set_log_probs(torch.ones(2, 1), weight, sets, temperature=1.0, vocab_size=5)
    torch.testing.assert_close(out.log_probs, torch.tensor([-1.40761, -1.57444]), atol=1e-5, rtol=0)


def test_singletons_and_unscored_tokens_are_exactly_nothing():
    case = make_case(4, sizes=(1,))
    got = run(case)
    assert all(not tensor.any() for tensor in got.values())


def test_only_singletons_touch_no_row(monkeypatch):
    from megatron_rl.keep_set import cpu_kernels

    monkeypatch.setattr(cpu_kernels, "pair_dots", None)
    monkeypatch.setattr(cpu_kernels, "weighted_sums", None)
    run(make_case(4, sizes=(1,)))


def test_rows_of_singletons_get_no_gradient_beside_others():
    case = make_case(5, sizes=(1, 4))
    got = run(case)
    idle = (case.keep_sets.kinds == TokenKind.UNSCORED) | (case.keep_sets.sizes() == 1)
    assert idle.any() and not got["d_hidden"][idle].any() and not got["log_probs"][idle].any()
    assert got["d_hidden"][~idle].any(1).all()


def test_a_huge_excluded_logit_cannot_overflow(route):
    case = make_case(6, sizes=(3, 4), full=0.0)
    never_kept = torch.ones(case.vocab_size, dtype=torch.bool)
    never_kept[case.keep_sets.keep_ids.long()] = False
    assert never_kept.any()
    case.weight[: case.vocab_size][never_kept] = 1e30
    assert_as_reference(case)


def test_large_logits_keep_the_digits_of_a_small_log_prob(route):
    weight = torch.tensor([[1000.0], [990.0], [0.0]])
    sets = KeepSets(torch.tensor([0]), torch.tensor([1], dtype=torch.uint8), torch.tensor([1, 0]).int(), torch.tensor([0, 2]))
    out = keep_set_log_probs(torch.ones(1, 1), weight, sets, temperature=1.0, vocab_size=3)
    wanted = -math.log1p(math.exp(-10.0))
    assert abs(float(out.log_probs) / wanted - 1) < 2e-3  # fp32's 6e-8 on a sum of 1.000045


def test_one_set_of_the_whole_vocabulary_is_the_ordinary_log_softmax(route):
    case = make_case(7, sizes=(50,))
    scored = (case.keep_sets.kinds != TokenKind.UNSCORED).numpy()
    full = KeepSets.from_ragged(case.keep_sets.target_ids.numpy(), scored, np.ones(24, dtype=bool), RaggedIds.empty(24))
    as_set = run(case)
    case.keep_sets = full
    for name, tensor in run(case).items():
        assert relative_difference(tensor, as_set[name]) < 2e-5, name


def test_the_order_of_ids_does_not_matter():
    case = make_case(8, sizes=(5,))
    sets = case.keep_sets
    reversed_ids = torch.cat([sets.keep_ids[a:b].flip(0) for a, b in pairwise(sets.keep_offsets)])
    before = run(case)
    case.keep_sets = KeepSets(sets.target_ids, sets.kinds, reversed_ids, sets.keep_offsets)
    for name, tensor in run(case).items():
        assert relative_difference(tensor, before[name]) < 2e-5, name


def test_same_inputs_same_bits_whatever_the_threads(route):
    case = make_case(9, num_tokens=300, vocab_size=400, num_rows=400, width=64, sizes=(1, 3, 60), full=0.1)
    first = run(case)
    for name, tensor in run(case).items():
        assert torch.equal(tensor, first[name]), name


def test_temperature_as_number_and_as_tensor_agree_and_matter():
    case = make_case(10)
    case.temperature = torch.full((24,), 0.7)
    as_tensor = run(case)
    case.temperature = 0.7
    as_number = run(case)
    assert all(torch.equal(as_tensor[name], as_number[name]) for name in as_tensor)
    case.temperature = 1.0
    assert relative_difference(run(case)["log_probs"], as_number["log_probs"]) > 0.1


def test_ratio_at_equal_weights_is_one_with_the_sets_and_the_kept_mass_without():
    generator = torch.Generator().manual_seed(11)
    num_tokens, vocab_size = 400, 12
    hidden, weight = torch.randn(num_tokens, 8, generator=generator), torch.randn(vocab_size, 8, generator=generator)
    probabilities, order = (hidden @ weight.t()).softmax(1).sort(1, descending=True)
    is_kept = (probabilities.cumsum(1) - probabilities) < 0.8
    mass = (probabilities * is_kept).sum(1)
    drawn = torch.multinomial(probabilities * is_kept, 1, generator=generator)
    targets = order.gather(1, drawn).squeeze(1)
    rollout = (probabilities.gather(1, drawn).squeeze(1) / mass).log()
    sets = RaggedIds.from_sizes(order[is_kept].int().numpy(), is_kept.sum(1).numpy())
    ones = np.ones(num_tokens, dtype=bool)
    replayed = KeepSets.from_ragged(targets.numpy(), ones, ~ones, sets)
    ratio = (keep_set_log_probs(hidden, weight, replayed, temperature=1.0, vocab_size=vocab_size).log_probs - rollout).exp()
    assert (ratio - 1).abs().max() < 1e-5
    unreplayed = KeepSets.from_ragged(targets.numpy(), ones, ones, RaggedIds.empty(num_tokens))
    ratio = (keep_set_log_probs(hidden, weight, unreplayed, temperature=1.0, vocab_size=vocab_size).log_probs - rollout).exp()
    torch.testing.assert_close(ratio, mass, atol=1e-5, rtol=0)
    assert 0.8 < ratio.mean() < 0.95


def test_mixed_tokens_equal_separate_calls(route):
    """The gradients of one call with all kinds are the sums of one call per kind."""
    case = make_case(12, full=0.3, sizes=(1, 2, 9))
    together, sets = run(case), case.keep_sets
    parts = []
    for kind in (TokenKind.KEEP_SET, TokenKind.FULL):
        chosen = sets.kinds == kind
        sizes = sets.sizes() * chosen
        ids = sets.keep_ids if kind == TokenKind.KEEP_SET else sets.keep_ids[:0]
        case.keep_sets = KeepSets(sets.target_ids, sets.kinds * chosen, ids, torch.nn.functional.pad(sizes.cumsum(0), (1, 0)))
        parts.append(run(case))
    for name, tensor in together.items():
        assert relative_difference(parts[0][name] + parts[1][name], tensor) < 2e-5, name


def test_without_gradient_the_values_are_the_same_bits_and_nothing_is_kept():
    case = make_case(13, full=0.2)
    weight = case.weight.clone().requires_grad_()
    with torch.no_grad():
        out = keep_set_log_probs(case.hidden, weight, case.keep_sets, temperature=case.temperature, vocab_size=case.vocab_size)
    assert out.log_probs.grad_fn is None and torch.equal(out.log_probs, run(case)["log_probs"])


def test_reported_entropy_holds_no_graph():
    case = make_case(14)
    out = keep_set_log_probs(
        case.hidden.requires_grad_(), case.weight, case.keep_sets, temperature=case.temperature, vocab_size=case.vocab_size
    )
    assert out.log_probs.requires_grad and not out.entropy.requires_grad
    out = keep_set_log_probs(
        case.hidden, case.weight, case.keep_sets, temperature=1.0, vocab_size=case.vocab_size, needs_entropy=False
    )
    assert out.entropy is None


def test_routes_agree_on_every_token(monkeypatch):
    case = make_case(15, num_tokens=60, vocab_size=200, num_rows=208, full=0.1, sizes=(1, 2, 20, 150))
    results = []
    for costs in FORCED_ROUTES.values():
        monkeypatch.setattr(shard_plan, "CPU_COSTS", costs)
        results.append(run(case))
    for other in results[1:]:
        for name, tensor in other.items():
            assert relative_difference(tensor, results[0][name]) < 2e-5, name


def test_no_token_at_all_and_no_scored_token():
    for case in (make_case(16, num_tokens=1, sizes=(1,)), make_case(16, num_tokens=0)):
        got = run(case)
        assert got["log_probs"].shape == case.upstream.shape and not got["d_weight"].any()


def test_what_would_give_a_wrong_number_is_refused_in_the_call(route):
    case = make_case(17, sizes=(3,))
    sets, first = case.keep_sets, int((case.keep_sets.kinds == TokenKind.KEEP_SET).nonzero()[0])
    place = int(sets.keep_offsets[first])
    for value, rule in ((case.vocab_size, "keep-set ids must be in"), (-1, "keep-set ids must be in")):
        ids = sets.keep_ids.clone()
        ids[place] = value
        case.keep_sets = KeepSets(sets.target_ids, sets.kinds, ids, sets.keep_offsets)
        with pytest.raises(ContractError, match=rule) as error:
            run(case)
        assert (error.value.token, error.value.value) == (first, value)
    targets = sets.target_ids.clone()
    kept = sets.keep_ids[place : place + 3].tolist()
    targets[first] = next(i for i in range(case.vocab_size) if i not in kept)
    case.keep_sets = KeepSets(targets, sets.kinds, sets.keep_ids, sets.keep_offsets)
    with pytest.raises(ContractError, match="the target is in its keep-set") as error:
        run(case)
    assert error.value.token == first


def test_a_lost_set_and_a_singleton_of_another_id_are_refused():
    """Both would silently score 0."""
    kinds, target, no_set = torch.tensor([1], dtype=torch.uint8), torch.tensor([3]), torch.zeros(0, dtype=torch.int32)
    for ids, offsets, rule in (
        (no_set, [0, 0], "keeps at least one id"),
        (no_set.new_tensor([4]), [0, 1], "the target is in its keep-set"),
    ):
        sets = KeepSets(target, kinds, ids, torch.tensor(offsets))
        with pytest.raises(ContractError, match=rule):
            keep_set_log_probs(torch.ones(1, 2), torch.ones(5, 2), sets, temperature=1.0, vocab_size=5)


def test_a_full_token_with_a_target_in_the_padding_is_refused():
    case = make_case(17, unscored=0.0, full=1.0)
    case.keep_sets.target_ids[4] = case.vocab_size
    with pytest.raises(ContractError, match="target ids must be in") as error:
        run(case)
    assert error.value.token == 4


def test_shapes_dtypes_and_temperature_are_checked():
    case = make_case(18)
    arguments = {"hidden": case.hidden, "weight": case.weight, "keep_sets": case.keep_sets, "temperature": 1.0, "vocab_size": 50}
    for changed in (
        {"hidden": case.hidden[:-1]}, {"hidden": case.hidden[:, :-1]}, {"hidden": case.hidden.double()}, {"temperature": 0.0},
        {"temperature": float("nan")}, {"temperature": torch.ones(3)}, {"vocab_size": 57}, {"vocab_size": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            keep_set_log_probs(**{**arguments, **changed})


def test_full_entropy_of_a_sample():
    case = make_case(19, full=1.0, unscored=0.0)
    sample = torch.tensor([20, 3, 7])
    got = entropy_full(
        case.hidden.requires_grad_(), case.weight, sample, temperature=case.temperature, vocab_size=case.vocab_size
    )
    assert not got.requires_grad
    assert relative_difference(got, reference(case, with_entropy=False)["entropy"][sample]) < VALUE_TOLERANCE[torch.float32]
