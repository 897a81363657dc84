"""The NCCL sender with vLLM's own producer, over stand-ins for CUDA's streams, for NCCL and for the servers.

Not proved here: anything that NCCL or a GPU does.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.inference.vllm import nccl
from megatron_rl.inference.vllm.nccl import NcclSender
from megatron_rl.wire.tensor_spec import TensorSpec
from tests.unit.inference import fake_streams
from tests.unit.inference.fake_streams import FakeCuda, RaceError
from tests.unit.inference.vllm import fake_nccl
from tests.unit.inference.vllm.fake_nccl import Communicator, Server

SHAPES = [(7, 3), (64, 33), (5,), (), (129, 2), (1, 1), (40, 40), (3, 5), (11,)]


class BucketSource:
    """Receives three tensors at a time in one buffer, as the trainer's ranks' weights are, and hands out pieces of it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {f"layer.{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}
        self.ended = 0

    @property
    def specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        items = list(self.tensors.items())
        for first in range(0, len(items), 3):
            bucket = items[first : first + 3]
            buffer = torch.cat([tensor.flatten() for _, tensor in bucket])
            pieces = buffer.split([tensor.numel() for _, tensor in bucket])
            del buffer
            for (name, tensor), piece in zip(bucket, pieces, strict=True):
                yield name, piece.view(tensor.shape) * 1 if tensor.dim() > 1 else piece.view(tensor.shape)
            del pieces
        self.ended += 1


def connected(servers: list[Server], **timeouts: float) -> NcclSender:
    sender = NcclSender("127.0.0.1", bucket_bytes=600, **{"timeout_s": 20, "join_timeout_s": 20, **timeouts})
    assert sender.connect(servers) == {}
    return sender


def sent_bytes(communicator: Communicator) -> bytes:
    return b"".join(bytes(packed.tolist()) for packed in communicator.sent)


@pytest.fixture
def cuda(monkeypatch, vllm_parts) -> FakeCuda:
    return fake_streams.installed(monkeypatch)


vllm_parts = fake_nccl.vllm_parts


def stream_over_fake(cuda: FakeCuda, source: BucketSource) -> Communicator:
    sender = connected([Server("a")])
    Communicator.on_broadcast = staticmethod(lambda tensor: cuda.reads(tensor, "NCCL"))
    with cuda:
        source.tensors = {name: tensor * 1 for name, tensor in source.tensors.items()}  # the optimizer's, on the default stream
        assert sender.stream(source) == {}
        torch.zeros(1)  # what was freed meanwhile is looked at by the next operation
    return Communicator.made[-1]


def test_every_tensor_is_read_after_it_was_made(cuda):
    source = BucketSource()
    communicator = stream_over_fake(cuda, source)
    assert len(cuda.streams) == 3 and len(communicator.sent) > 3, "the producer's two streams take turns"
    expected = b"".join(tensor.numpy().tobytes() for tensor in source.tensors.values())
    assert sent_bytes(communicator) == expected and source.ended == 1


def test_without_the_discipline_the_fake_sees_the_race(cuda, monkeypatch):
    monkeypatch.setattr(nccl, "readable_on_other_streams", lambda tensors: tensors)
    with pytest.raises(RaceError, match="has made, without having waited"):
        stream_over_fake(cuda, BucketSource())


def test_without_record_stream_the_fake_sees_that_memory_is_given_away(cuda, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    with pytest.raises(RaceError, match="freed while stream . may still read"):
        stream_over_fake(cuda, BucketSource())


def test_without_the_wait_the_fake_sees_the_race(cuda, monkeypatch):
    monkeypatch.setattr(fake_streams.FakeStream, "wait_stream", lambda stream, other: None)
    with pytest.raises(RaceError, match="has made, without having waited"):
        stream_over_fake(cuda, BucketSource())


def test_an_aborted_broadcast_is_an_error_at_once(cuda):
    """vLLM's communicator is silent once it is destroyed, so its producer would go on to the end as if all were well."""
    sender = connected([Server("a"), Server("b")], timeout_s=0.3)

    def hang(tensor: torch.Tensor) -> None:
        while not Communicator.made[-1].disabled:
            time.sleep(0.01)

    Communicator.on_broadcast = staticmethod(hang)
    source = BucketSource()
    lost = sender.stream(source)
    assert set(lost) == {"a", "b"} and "aborted after 0.3 s" in lost["a"]
    assert source.ended == 1, "the other ranks gather to the end, too"
    assert Communicator.made[-1].asked == 1


def test_a_group_that_breaks_before_the_stream_is_an_error_at_once(cuda):
    """As when one server refuses to start the update: the others would wait in NCCL, and the trainer for them."""
    servers = [Server("a"), Server("b")]
    sender = connected(servers)
    sender.disconnect("b")
    source = BucketSource()
    lost = sender.stream(source)
    assert set(lost) == {"a", "b"} and "server b, a member of the same NCCL group" in lost["a"] and source.ended == 1
    assert sender.connect(servers) == {} and sender.stream(BucketSource()) == {}


def test_an_abort_in_the_last_bucket_is_an_error(cuda):
    sender = connected([Server("a")], timeout_s=0.3)
    last = []

    def hang_at_the_end(tensor: torch.Tensor) -> None:
        last.append(tensor)
        if sum(t.numel() for t in last) == 4 * sum(torch.Size(shape).numel() for shape in SHAPES):
            while not Communicator.made[-1].disabled:
                time.sleep(0.01)

    Communicator.on_broadcast = staticmethod(hang_at_the_end)
    assert "aborted" in sender.stream(BucketSource())["a"]


def test_a_stream_in_time_is_not_aborted(cuda):
    sender = connected([Server("a")], timeout_s=0.5)
    assert sender.stream(BucketSource()) == {}
    time.sleep(0.7)
    assert not Communicator.made[-1].disabled


def test_the_group_has_as_many_members_as_the_servers_say(vllm_parts):
    """tensor 2 times pipeline 2 times data 2, whatever the configuration says of servers.tensor."""
    connected([Server("a", num_workers=8), Server("b")])
    assert Communicator.made[-1].world_size == 1 + 8 + 1


def test_joining_anew_destroys_the_old_group_on_both_sides(vllm_parts):
    servers = [Server("a"), Server("b")]
    sender = connected(servers[:1])
    assert sender.connect(servers) == {}
    first, second = Communicator.made
    assert first.disabled and not second.disabled
    assert servers[0].calls == ["leave", "join", "leave", "join"] and servers[0].groups == 1


def test_the_same_servers_keep_their_group(vllm_parts):
    servers = [Server("a"), Server("b")]
    sender = connected(servers)
    for server in servers:
        server.version = "3"
        sender.confirm(server, 3)
    assert sender.connect(servers) == {} and len(Communicator.made) == 1


def test_a_server_that_was_started_again_at_its_address_is_not_taken_for_the_former_one(vllm_parts):
    servers = [Server("a"), Server("b")]
    sender = connected(servers)
    for server in servers:
        server.version = "3"
        sender.confirm(server, 3)
    servers[1].version, servers[1].groups = "default", 0
    assert sender.connect(servers) == {} and len(Communicator.made) == 2


@pytest.mark.parametrize("fault", ["dead", "refuses", "hangs", "hangs in part"])
def test_a_server_that_does_not_join_costs_itself_not_the_fleet(vllm_parts, fault, monkeypatch):
    servers = [Server("a"), Server("b", num_workers=2), Server("c")]
    bad = servers[1]
    bad.is_dead, bad.refuses = fault == "dead", fault == "refuses"
    bad.hangs = {"hangs": 2, "hangs in part": 1}.get(fault, 0)
    # The good servers have to join, and to leave, within these limits on a busy machine too; only one that hangs is waited for.
    limit = 5 if bad.hangs else 60
    monkeypatch.setattr(nccl, "_FREED_S", 10.0 if bad.hangs else 60.0)
    sender = NcclSender("127.0.0.1", bucket_bytes=600, timeout_s=20, join_timeout_s=limit)
    failures = sender.connect(servers)
    bad.released.set()
    assert set(failures) == {"b"}, failures
    reasons = {"dead": "ConnectError", "refuses": "out of memory"}
    assert reasons.get(fault, f"not all of its workers came within {limit} s") in failures["b"]
    assert [communicator.world_size for communicator in Communicator.made] == [3]
    assert servers[0].groups == servers[2].groups == 1


def test_without_any_server_that_joins_all_have_failed(vllm_parts):
    servers = [Server("a"), Server("b")]
    for server in servers:
        server.refuses = True
    sender = NcclSender("127.0.0.1", bucket_bytes=600, timeout_s=20, join_timeout_s=5)
    assert set(sender.connect(servers)) == {"a", "b"} and Communicator.made == []
    source = BucketSource()
    assert sender.stream(source) == {} and source.ended == 1


def test_trouble_of_the_source_is_raised_as_it_is(cuda):
    class Broken(BucketSource):
        def __iter__(self):
            yield from list(super().__iter__())[:4]
            raise OSError("the trainer lost a rank")

    with pytest.raises(OSError, match="lost a rank"):
        connected([Server("a")]).stream(Broken())
