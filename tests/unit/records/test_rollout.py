"""The contract of a record: what keeps it passes, and each way to break it is refused by name, token and value."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.records import ContractError, ModelContract, RaggedIds, Sampling, check_keep_mass, check_rollout
from tests.unit.records.random_rollouts import CONTRACT, make_rollout, with_array, with_kept_id


@pytest.fixture
def rollout():
    return make_rollout(np.random.default_rng(5))


def refused(rollout, contract=CONTRACT) -> ContractError:
    with pytest.raises(ContractError) as caught:
        check_rollout(rollout, contract)
    assert caught.value.rollout == rollout.uid
    assert rollout.uid in str(caught.value)
    return caught.value


def test_random_rollouts_keep_the_contract():
    rng = np.random.default_rng(0)
    for trial in range(50):
        num_completion = int(rng.integers(1, 9))
        tools = tuple(np.flatnonzero(rng.random(num_completion) < 0.3))
        sampling = Sampling(top_p=0.9) if trial % 3 else Sampling()
        check_rollout(make_rollout(rng, num_completion=num_completion, sampling=sampling, tool_tokens=tools), CONTRACT)


def test_a_set_wider_than_top_k_by_ties_is_accepted():
    """It is the engine's to say what survived; cutting the set would change the distribution."""
    rollout = make_rollout(np.random.default_rng(1), sampling=Sampling(top_k=1))
    assert rollout.set_sizes.max() > 1
    check_rollout(rollout, CONTRACT)


def test_the_sampled_token_has_to_be_in_its_set(rollout):
    token = 2
    outside = np.setdiff1d(np.arange(50), rollout.keep_sets[token])[0]
    error = refused(with_array(rollout, "completion_ids", token, outside))
    assert error.token == token and str(outside) in str(error.value) and "in its keep-set" in error.rule


@pytest.mark.parametrize("bad", [-1, 50, 51, 2**31 - 1])
def test_kept_ids_lie_in_the_vocabulary_without_its_padding(rollout, bad):
    error = refused(with_kept_id(rollout, -1, bad))
    assert error.token == 5 and str(bad) in str(error.value)


def test_a_repeated_id_is_refused_by_its_token(rollout):
    token = int(np.flatnonzero(rollout.set_sizes >= 3)[0])
    first, kept = rollout.keep_sets.offsets[token], rollout.keep_sets[token]
    place = int(
        np.flatnonzero(kept != rollout.completion_ids[token])[0]
    )  # the sampled token stays, so that only repetition is wrong
    other = int(np.flatnonzero(np.arange(len(kept)) != place)[0])
    error = refused(with_kept_id(rollout, first + place, kept[other]))
    assert error.token == token and "twice" in str(error.value)


def test_a_log_prob_without_a_set_and_a_set_without_a_log_prob_are_torn_pairs(rollout):
    """As the engine gives them when the logits were NaN: an empty set."""
    size = rollout.set_sizes[0]
    offsets = rollout.keep_sets.offsets - np.where(np.arange(7) > 0, size, 0)
    error = refused(replace(rollout, keep_sets=RaggedIds(rollout.keep_sets.ids[size:], offsets)))
    assert error.token == 0 and "without a keep-set" in error.value
    error = refused(with_array(rollout, "loss_mask", 3, False))
    assert error.token == 3 and "where none belongs" in error.value
    error = refused(replace(rollout, sampling=Sampling()))
    assert error.token == 0 and "where none belongs" in error.value


@pytest.mark.parametrize("change", ["short", "long", "start", "end", "falling"])
def test_offsets_have_to_fit(rollout, change):
    offsets = rollout.keep_sets.offsets.copy()
    if change == "short":
        offsets = offsets[:-1]
    elif change == "long":
        offsets = np.append(offsets, offsets[-1])
    elif change == "start":
        offsets[0] = 1
    elif change == "end":
        offsets[-1] += 1
    else:
        offsets[2] = offsets[3] + 1
    assert "offsets" in refused(replace(rollout, keep_sets=RaggedIds(rollout.keep_sets.ids, offsets))).rule


def test_tool_tokens_carry_no_set_and_do_not_shift_the_next_turns():
    """Case 6: the sets after a tool's answer are those of their own tokens."""
    rollout = make_rollout(np.random.default_rng(2), num_completion=7, tool_tokens=(2, 3))
    check_rollout(rollout, CONTRACT)
    assert rollout.set_sizes[2] == rollout.set_sizes[3] == 0
    assert not rollout.singletons[2:4].any()
    shifted = replace(rollout, loss_mask=np.roll(rollout.loss_mask, 1))
    assert refused(shifted).token == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.5])
def test_log_probs_are_finite_and_not_positive(rollout, bad):
    assert refused(with_array(rollout, "logprobs", 4, bad)).token == 4


def test_a_log_prob_a_few_ulp_above_zero_is_the_engines_rounding(rollout):
    check_rollout(with_array(rollout, "logprobs", 4, 1e-6), CONTRACT)


@pytest.mark.parametrize(("name", "value"), [("prompt_ids", 50), ("prompt_ids", -1), ("completion_ids", 50)])
def test_token_ids_lie_in_the_vocabulary(rollout, name, value):
    assert refused(with_array(rollout, name, 1, value)).token == 1


@pytest.mark.parametrize("name", ["logprobs", "policy_versions", "loss_mask"])
def test_arrays_have_one_entry_a_completion_token(rollout, name):
    assert name in refused(replace(rollout, **{name: getattr(rollout, name)[:-1]})).rule


def test_empty_prompts_and_completions_are_refused(rollout):
    refused(replace(rollout, prompt_ids=rollout.prompt_ids[:0]))
    refused(replace(rollout, completion_ids=rollout.completion_ids[:0]))


def test_versions_never_fall(rollout):
    refused(with_array(rollout, "policy_versions", 5, 0))
    refused(with_array(rollout, "policy_versions", 0, -1))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_reward_is_a_finite_number(rollout, bad):
    refused(replace(rollout, reward=bad))


def test_routes_of_a_wrong_shape_are_refused(rollout):
    """Case 8: one row too few or too many, width 1 or 3 for top-2, a layer too many."""
    routes = rollout.routed_experts
    wider = np.concatenate([routes, (routes[..., :1] + 1) % 7], axis=-1)
    for wrong in (
        routes[:-1],
        np.concatenate([routes, routes[-1:]]),
        routes[..., :1],
        wider,
        np.repeat(routes, 2, axis=1),
        routes[:, 0],
    ):
        error = refused(replace(rollout, routed_experts=wrong))
        assert str(wrong.shape) in str(error.value)


def test_routes_of_a_wrong_dtype_range_or_with_a_repeated_expert_are_refused(rollout):
    routes = rollout.routed_experts
    for dtype in (np.int64, np.int16, np.float32):
        assert "dtype" in str(refused(replace(rollout, routed_experts=routes.astype(dtype))).value)
    error = refused(with_array(rollout, "routed_experts", (2, 1, 0), 7))
    assert error.token == 2 and "expert 7 in MoE layer 1" in error.value
    minus_one = with_array(rollout, "routed_experts", (3, 2), 255)  # -1 in uint8
    assert refused(minus_one).token == 3
    error = refused(with_array(rollout, "routed_experts", (4, 0, 1), routes[4, 0, 0]))
    assert error.token == 4 and "twice in MoE layer 0" in error.value


def test_more_than_256_experts_need_uint16():
    many = ModelContract(vocab_size=50, moe_layers=(0,), num_experts=300, experts_per_token=2)
    rollout = make_rollout(np.random.default_rng(3), contract=many)
    check_rollout(rollout, many)
    narrow = replace(
        rollout, routed_experts=np.zeros_like(rollout.routed_experts, dtype=np.uint8) + np.array([0, 1], dtype=np.uint8)
    )
    assert "uint16" in refused(narrow, many).rule


def test_a_dense_model_has_no_routes_to_check(rollout):
    check_rollout(rollout, replace(CONTRACT, moe_layers=()))


def test_the_kept_ids_carry_all_of_the_mass():
    """Ties beyond the limit: all-equal logits of 78 ids, 20 of them reported, hold .256."""
    sets = RaggedIds(np.arange(22, dtype=np.int32), np.array([0, 0, 2, 22]))
    whole = np.log(np.concatenate([[0.25, 0.75], np.full(20, 1 / 20)])).astype(np.float32)
    check_keep_mass("g1.0", sets, whole, tolerance=1e-3)
    cut = np.log(np.concatenate([[0.25, 0.75], np.full(20, 1 / 78)])).astype(np.float32)
    with pytest.raises(ContractError, match=r"g1\.0, token 2: found a probability mass of 0\.256"):
        check_keep_mass("g1.0", sets, cut, tolerance=1e-3)
    with pytest.raises(ContractError, match="token 1"):
        check_keep_mass("g1.0", sets, np.where(np.arange(22) == 1, np.nan, whole), tolerance=1e-3)


def test_the_error_survives_a_process_boundary():
    error = ContractError(rollout="g1.0", token=3, value="x", rule="r")
    again = pickle.loads(pickle.dumps(error))
    assert (again.rollout, again.token, again.value, again.rule, str(again)) == ("g1.0", 3, "x", "r", str(error))
