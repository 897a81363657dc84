"""The transaction and the Gloo sender, against stand-ins for the servers that fail where they are told to."""

import time
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.inference.sender import checked_tensors
from megatron_rl.inference.vllm.engine import VllmEngine
from megatron_rl.inference.vllm.gloo import GlooSender
from megatron_rl.weight_sync import update_servers
from megatron_rl.wire.tensor_spec import TensorSpec
from tests.unit.weight_sync.fake_server import FakeServer

KEY = "the key"
WHOLE_UPDATE = [
    "/pause",
    "/get_world_size",
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/resume",
]


class RandomSource:
    """Random tensors; counts its passes, those begun and those that came to the end."""

    def __init__(self, seed: int = 0, break_at: int | None = None):
        generator = torch.Generator().manual_seed(seed)
        shapes = [(7, 3), (64, 33), (5,), (), (129, 2), (1, 1), (40, 40)]
        self.tensors = {f"layer.{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
        self.tensors["layer.0.scale"] = torch.randn(11, generator=generator).to(torch.bfloat16)
        self.break_at = break_at
        self.begun = self.ended = 0

    @property
    def specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, t) for name, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.begun += 1
        for index, item in enumerate(self.tensors.items()):
            if index == self.break_at:
                raise OSError("the trainer lost a rank")
            yield item
        self.ended += 1


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    servers = [FakeServer("a"), FakeServer("b", num_workers=2), FakeServer("c")]
    yield servers
    for server in servers:
        server.close()


def push(fakes: list[FakeServer], source: RandomSource, version: int, **timeouts: float):
    sender = GlooSender(bucket_bytes=4096, timeout_s=timeouts.pop("sender_timeout_s", 20), receive_timeout_s=30)
    return update_servers(VllmEngine(), sender, [fake.address for fake in fakes], source, version, key=KEY, **timeouts)


def assert_holds(fake: FakeServer, source: RandomSource, version: int) -> None:
    assert fake.held == version and not fake.is_paused
    assert list(fake.tensors) == list(source.tensors)
    assert all(torch.equal(fake.tensors[name], tensor) for name, tensor in source.tensors.items())


def test_every_server_gets_every_tensor(fakes):
    for version in (3, 4):
        source = RandomSource(seed=version)
        report = push(fakes, source, version)
        assert report.held == ("a", "b", "c") and report.failed == {} and report.version == version
        assert report.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in source.tensors.values())
        assert (source.begun, source.ended) == (1, 1)
        for fake in fakes:
            assert_holds(fake, source, version)
            assert fake.calls == WHOLE_UPDATE
            fake.calls.clear()


@pytest.mark.parametrize("route", WHOLE_UPDATE)
def test_a_route_that_fails_takes_one_server_out(fakes, route):
    fakes[1].fail.add(route)
    source = RandomSource()
    # A server that does not receive holds the stream up for the sender's timeout, so that one is short here.
    report = push(fakes, source, 1, sender_timeout_s=4)
    assert report.held == ("a", "c")
    assert fakes[1].is_paused or route == "/pause"
    if route != "/update_weights":  # there the stream's own error may be seen first
        assert f"b: {route.replace('collective_rpc', '')}" in report.failed["b"] or route in report.failed["b"]
    assert source.ended == 1
    for fake in (fakes[0], fakes[2]):
        assert_holds(fake, source, 1)


def test_a_server_that_leaves_the_stream_does_not_disturb_the_others(fakes):
    fakes[0].leave_after = 1
    source = RandomSource()
    report = push(fakes, source, 1, sender_timeout_s=4)
    assert report.held == ("b", "c") and set(report.failed) == {"a"}
    assert fakes[0].is_paused and (source.begun, source.ended) == (1, 1)
    for fake in fakes[1:]:
        assert_holds(fake, source, 1)
    fakes[0].leave_after = None
    assert push(fakes, source, 2).held == ("a", "b", "c")
    assert_holds(fakes[0], source, 2)


def test_a_server_that_cannot_be_reached_is_named(fakes):
    fakes[2].close()
    report = push(fakes, RandomSource(), 1)
    assert report.held == ("a", "b")
    assert "c: /pause" in report.failed["c"] and "ConnectError" in report.failed["c"]


def test_a_server_that_hangs_is_not_waited_for(fakes):
    fakes[0].hang_s["/start_weight_update"] = 8.0
    report = push(fakes, RandomSource(), 1, route_timeout_s=4.0)
    assert report.held == ("b", "c") and "no answer within 4 s" in report.failed["a"]


def test_a_server_that_never_ends_loading_is_not_waited_for(fakes):
    fakes[0].load_s = 8.0
    report = push(fakes, RandomSource(), 1, timeout_s=4.0)
    assert report.held == ("b", "c")
    assert report.failed == {"a": "server a had not loaded the weights 4 s after the end of the stream"}


def test_one_server_that_stalls_the_stream_costs_the_others_no_time_of_theirs(fakes):
    fakes[1].hang_s["/update_weights"] = 8.0
    report = push(fakes, RandomSource(), 1, sender_timeout_s=5, timeout_s=4.0)
    assert report.held == ("a", "c") and "the stream broke" in report.failed["b"]


def test_a_server_that_says_it_holds_another_version_is_out(fakes):
    fakes[1]._finish_weight_update = lambda body: None
    report = push(fakes, RandomSource(), 7)
    assert report.held == ("a", "c")
    assert "the workers hold [-1, -1] after the update to 7" in report.failed["b"]
    assert "/resume" not in fakes[1].calls


def test_a_prefix_cache_that_stays_takes_the_server_out(fakes):
    fakes[0].reset_succeeds = False
    report = push(fakes, RandomSource(), 1)
    assert report.held == ("b", "c") and "/reset_prefix_cache" in report.failed["a"]


def test_a_server_with_replicas_is_refused_by_name(fakes):
    """Gloo's ranks and the check of what the workers hold know one replica."""
    fakes[1].num_replicas = 2
    report = push(fakes, RandomSource(), 1)
    assert report.held == ("a", "c") and "data-parallel replicas" in report.failed["b"]


@pytest.mark.parametrize("fail_all", [False, True])
def test_the_source_comes_to_its_end_without_a_server(fakes, fail_all):
    """The other ranks of the trainer iterate it too: a pass that ends early would leave them in a collective."""
    for fake in fakes:
        fake.fail.add("/start_weight_update")
    source = RandomSource()
    report = push(fakes if fail_all else [], source, 1)
    assert report.held == () and len(report.failed) == (3 if fail_all else 0)
    assert (source.begun, source.ended) == (1, 1)


def test_trouble_of_the_source_is_raised_and_no_server_resumes(fakes):
    sender = GlooSender(bucket_bytes=4096, timeout_s=20, receive_timeout_s=300)
    with pytest.raises(OSError, match="lost a rank"):
        update_servers(VllmEngine(), sender, [fake.address for fake in fakes], RandomSource(break_at=5), 1, key=KEY)
    assert all(fake.is_paused and "/finish_weight_update" not in fake.calls for fake in fakes)
    # The receivers are let go at once, and not left to their timeout.
    deadline = time.monotonic() + 60
    while not all("/update_weights" in fake.answered for fake in fakes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class ListSource:
    def __init__(self, announced: str, yielded: str, last: torch.Tensor | None = None):
        self.specs = [TensorSpec(name, (2,), "float32") for name in announced]
        self.tensors = [(name, torch.zeros(2)) for name in yielded]
        if last is not None:
            self.tensors[-1] = (yielded[-1], last)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), r"'c' as bfloat16 \[2\] where its specs announce float32 \[2\]"),
        (torch.zeros(1, 2), r"'c' as float32 \[1, 2\] where its specs announce float32 \[2\]"),
    ],
)
def test_a_tensor_of_another_dtype_or_shape_is_an_error(last, message):
    with pytest.raises(ValueError, match=message):
        list(checked_tensors(ListSource("abc", "abc", last)))


@pytest.mark.parametrize(
    ("announced", "yielded", "message"),
    [
        ("abc", "acb", "'c' where its specs announce 'b'"),
        ("ab", "a", "None where its specs announce 'b'"),
        ("a", "ab", "'b' after the last"),
    ],
)
def test_a_source_that_strays_from_its_metas_is_an_error(announced, yielded, message):
    with pytest.raises(ValueError, match=message):
        list(checked_tensors(ListSource(announced, yielded)))
    assert len(list(checked_tensors(ListSource("abc", "abc")))) == 3
