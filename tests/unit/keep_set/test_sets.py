"""The contract of keep-sets: every violation ends in an error that says whose, where and what."""

import numpy as np
import pytest
import torch

from megatron_rl.keep_set import KeepSets, TokenKind, check_keep_sets, keep_set_log_probs
from megatron_rl.records import ContractError, RaggedIds
from tests.unit.keep_set.cases import make_case, make_sets

GOOD = {"target_ids": [7, 2, 9, 4], "kinds": [1, 0, 2, 1], "keep_ids": [5, 7, 4], "keep_offsets": [0, 2, 2, 2, 3]}


def sets_with(**changed) -> KeepSets:
    values = {**GOOD, **changed}
    return KeepSets(
        torch.tensor(values["target_ids"]), torch.tensor(values["kinds"], dtype=torch.uint8),
        torch.tensor(values["keep_ids"], dtype=torch.int32), torch.tensor(values["keep_offsets"]),
    )  # fmt: skip


def test_good_sets_pass():
    check_keep_sets(sets_with(), vocab_size=10)
    check_keep_sets(make_case(0, full=0.2, sizes=(1, 4, 50)).keep_sets, vocab_size=50)
    check_keep_sets(make_sets(0, 10, [1], torch.Generator()), vocab_size=10)


def test_a_set_wider_than_top_k_by_ties_is_accepted_whole():
    sets = sets_with(keep_ids=[*range(10), 4], keep_offsets=[0, 10, 10, 10, 11])
    check_keep_sets(sets, vocab_size=10)
    assert sets.sizes().tolist() == [10, 0, 0, 1]


@pytest.mark.parametrize(
    ("changed", "token", "value", "rule"),
    [
        ({"target_ids": [6, 2, 9, 4]}, 0, 6, "the target is in its keep-set"),
        ({"target_ids": [7, 2, 9, 5]}, 3, 5, "the target is in its keep-set"),
        ({"keep_ids": [7, 7, 4]}, 0, 7, "an id is in a keep-set once"),
        ({"keep_ids": [-1, 7, 4]}, 0, -1, "keep-set ids must be in 0..9"),
        ({"keep_ids": [5, 7, 10]}, 3, 10, "keep-set ids must be in 0..9"),
        ({"target_ids": [7, 2, 10, 4]}, 2, 10, "target ids must be in 0..9"),
        ({"keep_offsets": [0, 3, 3, 3, 3]}, 3, 0, "keeps at least one id"),
        (
            {"keep_offsets": [0, 2, 3, 3, 3], "keep_ids": [5, 7, 4], "kinds": [1, 0, 2, 0]},
            1,
            1,
            "only KEEP_SET tokens have a set",
        ),
        ({"kinds": [1, 0, 2, 2]}, 3, 1, "only KEEP_SET tokens have a set"),
        ({"kinds": [1, 3, 2, 1]}, 1, 3, "kinds are"),
        ({"keep_offsets": [0, 3, 2, 2, 3]}, 1, -1, "keep_offsets never fall"),
        ({"keep_offsets": [0, 2, 2, 2, 4]}, 0, 4, "end at 3"),
        ({"keep_offsets": [1, 2, 2, 2, 3]}, 0, 1, "begin at 0"),
    ],
)
def test_violations_name_token_value_and_rule(changed, token, value, rule):
    with pytest.raises(ContractError, match=rule) as error:
        check_keep_sets(sets_with(**changed), vocab_size=10)
    assert (error.value.rollout, error.value.token, error.value.value) == ("unnamed", token, value)


def test_the_rollout_is_named_by_the_caller():
    with pytest.raises(ContractError) as error:
        check_keep_sets(sets_with(keep_ids=[5, 7, 10]), vocab_size=10, locate=lambda position: ("abc", position - 3))
    assert (error.value.rollout, error.value.token) == ("abc", 0)


def test_an_unscored_token_may_have_any_target():
    check_keep_sets(sets_with(target_ids=[7, -1, 9, 4]), vocab_size=10)


def test_masks_become_kinds():
    scored, full = np.array([True, False, True, False]), np.array([False, False, True, True])
    sets = KeepSets.from_ragged(np.zeros(4, dtype=np.int64), scored, full, RaggedIds.of([[0], [], [], []]))
    assert sets.kinds.tolist() == [TokenKind.KEEP_SET, TokenKind.UNSCORED, TokenKind.FULL, TokenKind.UNSCORED]


def test_multi_turn_rows_are_not_shifted_by_tool_tokens():
    """Two turns with a tool's answer between them: each set stays with its own token, whichever are unscored."""
    case = make_case(3, unscored=0.0, sizes=(2, 3))
    tool = torch.zeros(24, dtype=torch.bool)
    tool[8:15] = True
    sizes = case.keep_sets.sizes() * ~tool
    keep = torch.repeat_interleave(~tool, case.keep_sets.sizes())
    with_gap = KeepSets(
        case.keep_sets.target_ids, case.keep_sets.kinds * ~tool, case.keep_sets.keep_ids[keep],
        torch.nn.functional.pad(sizes.cumsum(0), (1, 0)),
    )  # fmt: skip
    check_keep_sets(with_gap, vocab_size=50)
    whole, gap = (
        keep_set_log_probs(case.hidden, case.weight, sets, temperature=case.temperature, vocab_size=50).log_probs
        for sets in (case.keep_sets, with_gap)
    )
    assert torch.equal(gap, torch.where(tool, 0.0, whole)) and whole[tool].all()


def test_shapes_and_dtypes_are_checked_at_construction():
    good = sets_with()
    fields = {name: getattr(good, name) for name in GOOD}
    for name, tensor in fields.items():
        for wrong in (tensor.float(), tensor[:, None]):
            with pytest.raises(ValueError, match=name):
                KeepSets(**{**fields, name: wrong})
    with pytest.raises(ValueError, match="keep_offsets"):
        KeepSets(**{**fields, "keep_offsets": good.keep_offsets[1:]})
