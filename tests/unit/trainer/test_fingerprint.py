"""Fingerprints and comparisons of steps: files, the first tensor that differs, what counts as equal. No process group."""

import pytest
import torch

from megatron_rl.trainer.comparison import StepComparison, comparable, differing_metrics
from megatron_rl.trainer.fingerprint import Fingerprint, TensorDifference, checksums
from megatron_rl.wire.control import decode, encode

LAYOUT = {"world_size": 2, "tensor": 1, "sequence_parallel": None}


def of_ranks(*ranks: dict[str, str]) -> Fingerprint:
    return Fingerprint(12, LAYOUT, ranks)


def test_a_checksum_sees_one_bit_of_any_tensor_and_the_sign_of_zero():
    state = {"w": torch.randn(3, 5), "w exp_avg": torch.zeros(7), "w step": torch.tensor(3.0)}
    before = checksums(state.items())
    assert list(before) == list(state) and all(len(value) == 16 for value in before.values())
    state["w exp_avg"][4] = -0.0
    after = checksums(state.items())
    assert [name for name in state if after[name] != before[name]] == ["w exp_avg"]


def test_a_fingerprint_comes_back_from_its_file_and_a_step_without_one_is_none(tmp_path):
    written = of_ranks({"a": "00"}, {"a": "01", "b": "02"})
    written.write(tmp_path / "fingerprints")
    assert Fingerprint.read(tmp_path / "fingerprints", 12) == written
    assert Fingerprint.read(tmp_path / "fingerprints", 13) is None
    assert [file.name for file in (tmp_path / "fingerprints").iterdir()] == ["step_000012.json"]


def test_the_first_difference_is_the_earliest_in_the_model_then_on_the_lowest_rank():
    recorded = of_ranks({"a": "0", "b": "1", "c": "2"}, {"a": "3", "b": "4", "c": "5"})
    assert recorded.first_difference(recorded) is None
    again = of_ranks({"a": "0", "b": "1", "c": "x"}, {"a": "3", "b": "x", "c": "x"})
    assert recorded.first_difference(again) == TensorDifference("b", rank=1, num_different=3)


def test_a_tensor_that_one_side_lacks_differs():
    recorded, again = of_ranks({"a": "0", "b": "1"}), of_ranks({"a": "0"})
    assert recorded.first_difference(again) == again.first_difference(recorded) == TensorDifference("b", rank=0, num_different=1)


def test_metrics_are_compared_to_the_bit_without_what_a_clock_measured():
    measured = {"loss": 0.1 + 0.2, "step_s": 2.0, "trainer_tokens_per_s": 9.0, "overhead_share": 0.1, "grad_norm": 1.0}
    values = comparable(measured)
    assert values.keys() == {"loss", "grad_norm"}
    assert differing_metrics({"loss": 0.3, "grad_norm": 1.0, "reward_mean": 4.0}, values) == {"loss": (0.3, 0.1 + 0.2)}


@pytest.mark.parametrize(
    ("recorded", "replayed", "same"), [("nan", "nan", True), ("nan", "inf", True), ("nan", "0", False), ("0", "nan", False)]
)
def test_what_is_no_number_is_recorded_as_null(recorded, replayed, same):
    assert (not differing_metrics({"x": float(recorded)}, {"x": float(replayed)})) is same


def test_a_comparison_travels_and_says_what_differs_and_by_how_much():
    first = TensorDifference("decoder.layers.0.mlp.router.weight", 1, 7)
    found = StepComparison(4, "fingerprints", first, 1.25e-7, num_tensors=30, metrics={"loss": (1.0, 1.5)}, num_metrics=9)
    assert decode(encode(found), StepComparison) == found
    assert not found.equal
    head, metric = found.text.splitlines()
    assert head == (
        "step 4: DIFFERS; the first tensor that differs is decoder.layers.0.mlp.router.weight on rank 1 by at most 1.25e-07; "
        "7 of 30 tensors differ; 1 of 9 metrics differ"
    )
    assert metric == "    loss: 1.0 recorded, 1.5 in the rerun"


def test_without_a_tensor_to_compare_the_text_says_so():
    found = StepComparison(4, "metrics", num_metrics=9)
    assert found.equal and "no tensor is compared" in found.text
