"""The export on rank 0 of two, with the other rank's message made here; several real ranks are in tests/distributed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.engine.weight_export import WeightExport
from megatron_rl.inference.sender import checked_tensors
from megatron_rl.inference.vllm.nccl import NcclSender
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement
from tests.unit.inference import fake_streams
from tests.unit.inference.vllm import fake_nccl
from tests.unit.inference.vllm.fake_nccl import Communicator, Server

DATA = Path(__file__).parents[2] / "data"
SINKS = "self_attn.sinks"


def export_of(config: dict, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> WeightExport:
    """In bfloat16, with fp32 where Transformer Engine has it."""
    table = ParameterTable(config, padded_vocab_size=layout.padded_vocab_size(config["vocab_size"]))
    shards: dict[str, torch.Tensor] = {}

    def shard_of(held) -> torch.Tensor:
        name = held.parameter.name
        if name not in shards:
            dtype = torch.float32 if name.endswith("softmax_offset") else held.parameter.dtype or torch.bfloat16
            shards[name] = torch.full(held.parameter.shard_shape(held.num_shards), len(shards) / 3).to(dtype)
        return shards[name]

    def recv(buffer: torch.Tensor, src: int) -> None:
        buffer.copy_(torch.arange(buffer.numel()) % 50)

    monkeypatch.setattr(torch.distributed, "recv", recv)
    export = WeightExport(Placement(table, layout), 0, torch.device("cpu"), torch.bfloat16, shard_of)
    dict(export)  # all shards are there: a model's parameters are older than the stream
    return export


@pytest.mark.parametrize("layout", [Layout(), Layout(world_size=2, tp=2)], ids=str)
def test_sinks_are_sent_in_the_dtype_that_was_announced(layout, monkeypatch):
    """Transformer Engine holds them in fp32; a receiver that lays out bfloat16 would read all that follows at wrong places."""
    config = json.loads((DATA / "small_families.json").read_text())["gpt_oss_moe"]
    export = export_of(config, layout, monkeypatch)
    tensors = [(spec, tensor) for spec, tensor in checked_tensors(export)]
    assert any(spec.name.endswith(SINKS) for spec, _ in tensors)
    assert sum(spec.num_bytes for spec in export.specs) == sum(t.numel() * t.element_size() for _, t in tensors)


@pytest.fixture
def cuda(monkeypatch) -> Iterator[fake_streams.FakeCuda]:
    fake_nccl.install(monkeypatch, fake_nccl.installed_packed_tensor())
    return fake_streams.installed(monkeypatch)


def test_the_stream_of_a_model_is_read_after_it_was_made(cuda, monkeypatch):
    """Buckets received from another rank, over vLLM's packer; tests/unit/inference/vllm/test_nccl.py has what breaks it."""
    model = json.loads((DATA / "small_models.json").read_text())["qwen3_moe"]
    sender = NcclSender("127.0.0.1", bucket_bytes=2000, timeout_s=60)
    assert sender.connect([Server("a")]) == {}
    Communicator.on_broadcast = staticmethod(lambda tensor: cuda.reads(tensor, "NCCL"))
    with cuda:
        export = export_of(model, Layout(world_size=2, tp=2), monkeypatch)
        assert sender.stream(export) == {}
        torch.zeros(1)
    sent = b"".join(bytes(packed.tolist()) for packed in Communicator.made[-1].sent)
    assert sent == b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in export)
