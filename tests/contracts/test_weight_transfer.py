"""The NCCL sender's calls, recorded over stand-ins, against the kept facts of vLLM's weight transfer.

Not proved here: what these interfaces do on a GPU.
"""

import copy
import sys
import types

import pytest

from megatron_rl.inference.vllm.nccl import NcclSender
from scripts.contracts import packing
from tests.contracts.kept import FACTS, downloaded
from tests.unit.inference import fake_streams
from tests.unit.inference.vllm import fake_nccl
from tests.unit.inference.vllm.fake_nccl import Communicator, Server
from tests.unit.inference.vllm.test_nccl import BucketSource, sent_bytes, stream_over_fake

FACTS_OF_THE_PROTOCOL = FACTS["vllm"]["packed"]


def test_joining_gives_the_fields_that_there_are_and_all_that_are_demanded(monkeypatch):
    fake_nccl.install(monkeypatch, fake_nccl.installed_packed_tensor())
    joined = []

    class Recorded(Server):
        def join_group(self, info: dict) -> None:
            joined.append(info)
            super().join_group(info)

    sender = NcclSender("127.0.0.1", bucket_bytes=600, timeout_s=20)
    assert sender.connect([Recorded("a")]) == {}
    assert set(FACTS_OF_THE_PROTOCOL["init_required"]) <= joined[0].keys() <= FACTS_OF_THE_PROTOCOL["init_fields"].keys()


def test_the_producer_is_called_by_its_parameters(monkeypatch):
    fake_nccl.install(monkeypatch, fake_nccl.installed_packed_tensor())
    fake_streams.installed(monkeypatch)
    called: list[dict] = []
    recorder = types.SimpleNamespace(packed_nccl_broadcast_producer=lambda **arguments: called.append(arguments))
    monkeypatch.setitem(sys.modules, fake_nccl.PACKED, recorder)
    sender = NcclSender("127.0.0.1", bucket_bytes=600, timeout_s=20)
    sender.connect([Server("a")])
    sender.stream(BucketSource())
    parameters = FACTS_OF_THE_PROTOCOL["producer"]
    assert {name for name in parameters if not name.endswith("=")} <= set(called[0])
    assert set(called[0]) <= {name.rstrip("=") for name in parameters}


def test_the_sender_does_what_vllm_does_not():
    """If one of these changes, the sender's own care for it can go."""
    assert FACTS_OF_THE_PROTOCOL["broadcast_is_silent_when_disabled"], "the watchdog's check"
    assert not FACTS_OF_THE_PROTOCOL["joining_destroys"], "leave_group before join_group"


def test_a_protocol_that_differs_is_named():
    changed = copy.deepcopy(FACTS_OF_THE_PROTOCOL)
    del changed["init_fields"]["packed"]
    changed["update_required"].append("checksums")
    changed["producer"].remove("post_iter_func")
    changed["shutdown_destroys"] = False
    assert packing.misfits(changed) == [
        "init_info has no field packed",
        "update_info demands a field checksums",
        "vLLM's producer takes no post_iter_func",
        "vLLM's worker does not destroy its communicator when it is told to leave a group",
    ]


@pytest.mark.slow
def test_the_pinned_producer_reads_after_it_was_made(monkeypatch, tmp_path):
    """As tests/unit/inference/vllm/test_nccl.py, over the producer of the vLLM that GPU machines install."""
    root = downloaded("vllm", tmp_path)
    fake_nccl.install(monkeypatch, root.joinpath(*packing.PACKED.split(".")).with_suffix(".py"))
    source = BucketSource()
    stream_over_fake(fake_streams.installed(monkeypatch), source)
    assert sent_bytes(Communicator.made[-1]) == b"".join(t.numpy().tobytes() for t in source.tensors.values())
