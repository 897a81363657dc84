"""A stand-in for CUDA's streams on a CPU: values are computed at once, and whoever reads without having waited is named.

Each stream has a clock, and knows how far it has seen the others' (a vector clock). An operation is the next tick of the current
stream; it tags the memory that it writes, and must have seen the tick of the last write of what it reads. Freed memory must not
be given away while another stream reads it: either that stream was recorded on it, or its owner has waited for the read.

It knows torch's operations and what is passed to `reads`. Not proved with it: what NCCL and the allocator really do.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RaceError(AssertionError):
    """A stream has read what another one has made, or freed, without waiting."""


class FakeStream:
    def __init__(self, device: object = None, *, cuda: "FakeCuda") -> None:
        self.cuda, self.seen = cuda, {}
        self.name = f"stream {len(cuda.streams)}"
        cuda.streams.append(self)

    def tick(self) -> int:
        _merge(self.seen, self.cuda.host)  # launched now, after all that the host has waited for
        self.seen[self] = self.seen.get(self, 0) + 1
        return self.seen[self]

    def wait_stream(self, other: "FakeStream") -> None:
        _merge(self.seen, other.seen)

    def record_event(self) -> dict["FakeStream", int]:
        return dict(self.seen)

    def wait_event(self, event: dict["FakeStream", int]) -> None:
        _merge(self.seen, event)

    def synchronize(self) -> None:
        _merge(self.cuda.host, self.seen)


class _Memory:
    """One storage: who owns it, the last write, the last read of each other stream, the streams recorded on it."""

    def __init__(self, reference: StorageWeakRef, owner: FakeStream) -> None:
        self.reference, self.owner = reference, owner
        self.written = (owner, 0)
        self.reads: dict[FakeStream, int] = {}
        self.recorded: set[FakeStream] = set()


class FakeCuda(TorchDispatchMode):
    """Use as a context; `installed` puts it behind torch.cuda."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[FakeStream] = []
        self.host: dict[FakeStream, int] = {}
        self.current = FakeStream(cuda=self)
        self._memory: dict[int, _Memory] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._check_freed()
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        if func._schema.is_mutable or not _only_views(inputs, outputs):
            tick = self.current.tick()
            for tensor in inputs:
                self._read(tensor, tick, str(func))
            for tensor in outputs:
                self._of(tensor).written = (self.current, tick)
        return out

    def reads(self, tensor: torch.Tensor, what: str) -> None:
        """Something outside torch, such as NCCL, reads it on the current stream."""
        self._read(tensor, self.current.tick(), what)

    def record(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self._of(tensor).recorded.add(stream)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is None:
            known = self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), self.current)
        return known

    def _read(self, tensor: torch.Tensor, tick: int, what: str) -> None:
        memory = self._of(tensor)
        writer, written = memory.written
        if self.current.seen.get(writer, 0) < written:
            raise RaceError(f"{what} on {self.current.name} reads what {writer.name} has made, without having waited for it")
        if self.current is not memory.owner:
            memory.reads[self.current] = tick

    def _check_freed(self) -> None:
        for key, memory in list(self._memory.items()):
            if not memory.reference.expired():
                continue
            del self._memory[key]
            _merge(memory.owner.seen, self.host)
            for reader, tick in memory.reads.items():
                if reader not in memory.recorded and memory.owner.seen.get(reader, 0) < tick:
                    raise RaceError(f"memory of {memory.owner.name} was freed while {reader.name} may still read it")


def installed(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """torch.cuda's streams are this fake's until the test ends."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: FakeStream(device, cuda=cuda))
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.current)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", _recording(cuda))
    return cuda


def _recording(cuda: FakeCuda) -> Callable[[torch.Tensor, FakeStream], None]:
    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:  # a function: a bound method would not get the tensor
        cuda.record(tensor, stream)

    return record_stream


def _merge(clock: dict[FakeStream, int], other: dict[FakeStream, int]) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _only_views(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """A view is made on the host: nothing is read."""
    held = {tensor.untyped_storage()._cdata for tensor in inputs}
    return bool(inputs) and all(tensor.untyped_storage()._cdata in held for tensor in outputs)
