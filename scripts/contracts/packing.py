"""vLLM's packed protocol for weights over NCCL: a stream of the program's sender through vLLM's own producer and consumer."""

import ast
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from megatron_rl.inference.sender import ServerAddress
from megatron_rl.inference.vllm.nccl import NUM_BUFFERS, NcclSender
from megatron_rl.wire.tensor_spec import TensorSpec

from .source import all_fields, definition, required_fields, signature

PACKED = "vllm.distributed.weight_transfer.packed_tensor"
BUCKET_BYTES = 64
STREAM = (
    TensorSpec("a.norm", (5,), "float32"),
    TensorSpec("a.weight", (4, 6), "bfloat16"),
    TensorSpec("b.packed", (3, 8), "uint8"),
    TensorSpec("b.scale", (3, 4), "float8_e4m3fn"),
    TensorSpec("b.global_scale", (), "float32"),  # a scalar, which is sent as one element
    TensorSpec("c.weight", (8, 40), "bfloat16"),  # larger than a bucket
    TensorSpec("c.bias", (3,), "float16"),
)
"""Small tensors of every dtype that an update carries, over several buckets. Each starts at a multiple of its element's size
within its bucket: vLLM's consumer raises a RuntimeError for one that does not, such as fp32 after an odd number of bytes."""


class Stream(Sequence):
    """The weight source: recognisable bytes."""

    specs = STREAM

    def __len__(self) -> int:
        return len(STREAM)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, spec in enumerate(STREAM):
            content = torch.arange(spec.num_bytes, dtype=torch.int64).add(17 * number).remainder(120).to(torch.uint8)
            yield spec.name, content.view(spec.torch_dtype).reshape(spec.shape)


class Wire:
    """Both ends of the communicator: keeps what is broadcast, and hands it out again."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self._next = itertools.count()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        self.sent.append(tensor.clone())

    def destroy(self) -> None: ...

    def reader(self) -> SimpleNamespace:
        return SimpleNamespace(broadcast=lambda tensor, src: tensor.copy_(self.sent[next(self._next)]))


def packing_facts(root: Path) -> dict[str, Any]:
    """The protocol's messages, the buckets that the stream above becomes, and what the sender has to do since vLLM does not."""
    distributed = root / "vllm" / "distributed"
    folder = distributed / "weight_transfer"
    common, engine, packed = folder / "nccl_common.py", folder / "nccl_engine.py", folder / "packed_tensor.py"
    pynccl = distributed / "device_communicators" / "pynccl.py"
    loop = "".join(ast.unparse(definition(packed, name)) for name in ("packed_nccl_broadcast_producer", "pack_tensors"))
    return {
        "init_fields": all_fields(common, "NCCLWeightTransferInitInfo"),
        "init_required": required_fields(common, "NCCLWeightTransferInitInfo"),
        "update_fields": all_fields(engine, "NCCLWeightTransferUpdateInfo"),
        "update_required": required_fields(engine, "NCCLWeightTransferUpdateInfo"),
        "group_required": required_fields(distributed / "utils.py", "StatelessProcessGroup"),
        "communicator": signature(pynccl, "PyNcclCommunicator.__init__"),
        "producer": signature(packed, "packed_nccl_broadcast_producer"),
        "producer_sha256": hashlib.sha256(loop.encode()).hexdigest(),
        "broadcast_is_silent_when_disabled": "if self.disabled:\n        return"
        in ast.unparse(definition(pynccl, "PyNcclCommunicator.broadcast")),
        "joining_destroys": "shutdown" in ast.unparse(definition(engine, "NCCLWeightTransferEngine.init_transfer_engine")),
        "shutdown_destroys": ".destroy()" in ast.unparse(definition(engine, "NCCLWeightTransferEngine.shutdown")),
        "bucket_bytes": BUCKET_BYTES,
        "buckets_of_the_stream": [len(bucket) for bucket in _send(root)[0].sent],
    }


def what_is_not_received(root: Path, facts: Mapping[str, Any]) -> list[str]:
    """Send the stream by the program's sender, receive it by vLLM's consumer as the announcement says; what differs."""
    wire, announcement, module = _send(root)
    problems = misfits(facts)
    entries = zip(announcement["names"], announcement["dtype_names"], announcement["shapes"], strict=True)
    expected = ((name, (shape, getattr(torch, dtype))) for name, dtype, shape in entries)
    received: list[tuple[str, torch.Tensor]] = []
    with _as_on_a_gpu(module):
        module.packed_nccl_broadcast_consumer(
            iterator=expected, group=wire.reader(), src=0,
            post_unpack_func=lambda some: received.extend((n, t.clone()) for n, t in some),
            buffer_size_bytes=BUCKET_BYTES, num_buffers=NUM_BUFFERS, device="cpu",
        )  # fmt: skip
    if [name for name, _ in received] != [spec.name for spec in STREAM]:
        return [
            *problems,
            f"of the stream {[spec.name for spec in STREAM]} the workers received {[name for name, _ in received]}",
        ]
    for (name, got), (_, sent) in zip(received, Stream(), strict=True):
        if got.dtype != sent.dtype or not torch.equal(got.view(torch.uint8).flatten(), _bytes(sent)):
            problems.append(f"{name} arrives with other bytes than were sent")
    return problems


def misfits(facts: Mapping[str, Any]) -> list[str]:
    """Fields of the sender's two messages that vLLM's dataclasses do not have, or have in addition and demand; its calls."""
    sender = NcclSender("127.0.0.1", bucket_bytes=BUCKET_BYTES)
    place = ("master_address", "master_port", "world_size", "rank_offset")
    sent = {"init": {*place, *sender._protocol()}, "update": set(sender.announcement(STREAM, 1))}
    problems = []
    for message, names in sent.items():
        problems += [f"{message}_info has no field {name}" for name in sorted(names - set(facts[f"{message}_fields"]))]
        problems += [f"{message}_info demands a field {name}" for name in facts[f"{message}_required"] if name not in names]
    takes = {name.rstrip("=") for name in facts["producer"]}
    given = {"iterator", "group", "src", "post_iter_func", "buffer_size_bytes", "num_buffers"}
    problems += [f"vLLM's producer takes no {name}" for name in sorted(given - takes)]
    if facts["communicator"][:3] != ["self", "group", "device"]:
        problems.append(f"PyNcclCommunicator takes {facts['communicator']}, the sender gives group and device")
    if sorted(facts["group_required"]) != ["rank", "store", "world_size"]:
        problems.append(f"StatelessProcessGroup demands {facts['group_required']}, the sender gives rank, world_size and store")
    if not facts["shutdown_destroys"]:
        problems.append("vLLM's worker does not destroy its communicator when it is told to leave a group")
    return problems


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _send(root: Path) -> tuple[Wire, dict[str, Any], ModuleType]:
    """The stream over a wire, its announcement, and vLLM's module that packed it."""
    module = _packed_module(root)
    wire, sender = Wire(), NcclSender("127.0.0.1", bucket_bytes=BUCKET_BYTES, timeout_s=60.0)
    sender._communicator, sender._members = wire, (ServerAddress("server-0", "http://server"),)  # type: ignore[assignment]
    with _as_on_a_gpu(module):
        failed = sender.stream(Stream())
    assert not failed, failed
    return wire, sender.announcement(STREAM, 1), module


def _packed_module(root: Path) -> ModuleType:
    file = root.joinpath(*PACKED.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(PACKED, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _as_on_a_gpu(ExitStack):  # noqa: N801  # read as a context: `with _as_on_a_gpu(module)`
    """vLLM's module under its own name, with streams and events that do nothing. The order of streams is not shown."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        parents = [PACKED.rsplit(".", n)[0] for n in range(1, PACKED.count(".") + 1)]
        self.enter_context(patch.dict(sys.modules, {**{name: ModuleType(name) for name in parents}, PACKED: module}))
        self.enter_context(patch.object(module, "_get_streams", lambda device, count: tuple(MagicMock() for _ in range(count))))
        for owner, name, stand_in in (
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.cuda, "current_stream", lambda *_: MagicMock()),
            (torch.cuda, "Event", MagicMock),
            (torch, "Event", MagicMock),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "current_stream", lambda *_: MagicMock()),
            (torch.Tensor, "record_stream", lambda tensor, stream: None),
        ):
            self.enter_context(patch.object(owner, name, stand_in))
