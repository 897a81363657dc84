"""The NCCL sender and the control calls against what vLLM 0.33.0's source offers.

The facts are kept in tests/data. The slow test downloads the wheel, derives them anew and sends a stream through its producer:

    pytest tests/unit/inference/vllm/test_weight_transfer_contract.py -m slow

With another version in FACTS and `python -m tests.unit.inference.vllm.test_weight_transfer_contract` the facts are written anew.
Not proved here: what these interfaces do on a GPU.
"""

import json
import sys
import tempfile
import types
from pathlib import Path

import httpx
import pytest

from megatron_rl.inference.sender import ServerAddress
from megatron_rl.inference.vllm.control import VllmControl
from megatron_rl.inference.vllm.nccl import NcclSender
from megatron_rl.wire.tensor_spec import TensorSpec
from tests.unit.inference import fake_streams
from tests.unit.inference.vllm import fake_nccl
from tests.unit.inference.vllm.fake_nccl import Communicator, Server
from tests.unit.inference.vllm.test_nccl import BucketSource, sent_bytes, stream_over_fake
from tests.unit.inference.vllm.weight_transfer_facts import PACKED, download, facts_of

VERSION = "0.33.0"
FACTS = Path(__file__).parents[3] / "data" / f"vllm_{VERSION}_weight_transfer.json"


@pytest.fixture
def facts() -> dict:
    return json.loads(FACTS.read_text())


def test_every_route_of_the_control_exists(facts):
    asked = set()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.add(f"{request.method} {request.url.path}")
        return httpx.Response(200, json={"success": True, "weight_version": "1", "world_size": 2, "results": []})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        control = VllmControl(ServerAddress("a", "http://a"), client, 1.0)
        for call in (control.pause, control.resume, control.leave_group, control.start_update, control.reset_prefix_cache):
            call()
        for call, argument in ((control.join_group, {}), (control.receive, {}), (control.finish_update, 1)):
            call(argument)
        assert control.num_workers() == control.num_workers(of_all_replicas=False) == 2 and control.weight_version() == "1"
        control.call_workers("held_version")
    assert len(asked) == 11 and asked <= set(facts["routes"])


def test_joining_and_announcing_use_the_fields_that_there_are(facts, monkeypatch):
    fake_nccl.install(monkeypatch, fake_nccl.installed_packed_tensor())
    joined = []

    class Recorded(Server):
        def join_group(self, info: dict) -> None:
            joined.append(info)
            super().join_group(info)

    sender = NcclSender("127.0.0.1", bucket_bytes=600, timeout_s=20)
    assert sender.connect([Recorded("a")]) == {}
    for given, fields in ((joined[0], facts["init_info"]), (sender.announcement([], 1), facts["update_info"])):
        assert given.keys() <= fields.keys()
        assert {name for name, has_default in fields.items() if not has_default} <= given.keys()
    assert sender.announcement([TensorSpec("w", (2,), "float32")], 1)["dtype_names"] == ["float32"]
    assert {name for name, has_default in facts["metadata_group"].items() if not has_default} == {"rank", "world_size", "store"}
    assert facts["communicator"][:3] == ["self", "group", "device"]


def test_the_producer_is_called_by_its_parameters(facts, monkeypatch):
    fake_nccl.install(monkeypatch, fake_nccl.installed_packed_tensor())
    fake_streams.installed(monkeypatch)
    called: list[dict] = []
    recorder = types.SimpleNamespace(packed_nccl_broadcast_producer=lambda **arguments: called.append(arguments))
    monkeypatch.setitem(sys.modules, fake_nccl.PACKED, recorder)
    sender = NcclSender("127.0.0.1", bucket_bytes=600, timeout_s=20)
    sender.connect([Server("a")])
    sender.stream(BucketSource())
    assert set(called[0]) <= set(facts["producer"])


def test_the_sender_does_what_vllm_does_not(facts):
    """If one of these changes, the sender's own care for it can go."""
    assert facts["broadcast_is_silent_when_disabled"], "the watchdog's check"
    assert not facts["joining_destroys"] and facts["shutdown_destroys"], "leave_group before join_group"


@pytest.mark.slow
def test_the_wheel_says_so_and_its_producer_reads_after_it_was_made(facts, monkeypatch, tmp_path):
    vllm = download(VERSION, tmp_path)
    assert facts_of(vllm) == facts
    fake_nccl.install(monkeypatch, vllm / PACKED)
    source = BucketSource()
    stream_over_fake(fake_streams.installed(monkeypatch), source)
    assert sent_bytes(Communicator.made[-1]) == b"".join(t.numpy().tobytes() for t in source.tensors.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FACTS.write_text(json.dumps(facts_of(download(VERSION, Path(folder))), indent=1) + "\n")
