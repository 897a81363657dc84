"""Control messages: what is sent is received, and what is no such message is refused."""

import dataclasses

import pytest

from megatron_rl.records import GroupResult, GroupTask, RolloutSummary
from megatron_rl.wire import control
from megatron_rl.wire.control import Ack, GroupReport, Order, StepReport, WeightsReport, WorkOrder, decode, encode

SUMMARY = RolloutSummary("g1.0", "rollouts/g1.safetensors", 0, 3, 4, 4, 2, 9, 4, 6, 0.5, "stop", 1, 2)
RESULT = GroupResult(
    "g1", 5, 0, "http://127.0.0.1:8000", (SUMMARY,), examples=({"prompt": "1+1=", "completion": "2", "reward": 1.0},)
)
MESSAGES = [
    Ack(),
    WorkOrder((GroupTask("g1", 5, 0, 8, "http://127.0.0.1:8000", probe=True),)),
    GroupReport("worker 0", RESULT),
    GroupReport("worker 0", GroupResult("g1", 5, 2, "", failure="reward", message="ZeroDivisionError: ä")),
    Order("sync", servers=("http://127.0.0.1:8000", "http://127.0.0.1:8001")),
    StepReport(3, {"loss": -1e-30, "entropy_keep_set": 0.1 + 0.2}),
    WeightsReport(4, (), failed={"http://127.0.0.1:8000": "timed out"}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message):
    """Exactly: floats too, and tuples stay tuples, so that records remain comparable."""
    assert decode(encode(message), type(message)) == message


def test_every_message_is_a_frozen_dataclass():
    kinds = [v for v in vars(control).values() if isinstance(v, type) and v.__module__ == control.__name__]
    assert len(kinds) > 10
    for kind in kinds:
        assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen, kind


@pytest.mark.parametrize("data", [b"", b'{"step": 3', b"[]", b'{"metrics": {}}', b'{"step": "three", "metrics": {}}'])
def test_what_is_no_such_message_is_refused(data):
    with pytest.raises(ValueError, match="StepReport|step|JSON"):
        decode(data, StepReport)


def test_an_unknown_kind_of_order_is_refused():
    with pytest.raises(ValueError, match="kind"):
        decode(b'{"kind": "explode"}', Order)


def test_a_metric_that_is_no_number_travels():
    """A NaN loss has to be seen, and must not break the report of the step."""
    message = StepReport(3, {"loss": float("nan"), "grad_norm": float("inf")})
    metrics = decode(encode(message), StepReport).metrics
    assert metrics["loss"] != metrics["loss"] and metrics["grad_norm"] == float("inf")
