"""Stand-ins for what the NCCL sender takes from vLLM: real stores and rendezvous, no NCCL. `packed_tensor` is vLLM's own file."""

import importlib.util
import pickle
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import ServerAddress
from megatron_rl.wire.stores import join_store

PACKED = "vllm.distributed.weight_transfer.packed_tensor"


def installed_packed_tensor() -> Path:
    """Of the vLLM in this environment, without importing vLLM."""
    folder = next(iter(importlib.util.find_spec("vllm").submodule_search_locations))
    return Path(folder) / "distributed" / "weight_transfer" / "packed_tensor.py"


@dataclass
class Group:
    """As vLLM's StatelessProcessGroup."""

    rank: int
    world_size: int
    store: object

    def broadcast_obj(self, value: object, src: int) -> object:
        if self.rank == src:
            self.store.set("broadcast_from/0/0", pickle.dumps(value))
            return value
        return pickle.loads(self.store.get("broadcast_from/0/0"))


class Communicator:
    """Records what rank 0 broadcasts. Like vLLM's, it needs all members, and is silent once it is destroyed."""

    made: ClassVar[list["Communicator"]] = []
    on_broadcast: ClassVar[Callable[[torch.Tensor], None]] = staticmethod(lambda tensor: None)

    def __init__(self, group: Group, device: int) -> None:
        group.broadcast_obj("id", src=0)
        group.store.add("in_nccl", 1)
        while group.store.add("in_nccl", 0) < group.world_size:
            time.sleep(0.01)
        self.world_size, self.disabled = group.world_size, False
        self.sent: list[torch.Tensor] = []
        self.asked = 0
        self.made.append(self)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.asked += 1
        if self.disabled:
            return
        assert src == 0
        Communicator.on_broadcast(tensor)
        self.sent.append(tensor)

    def destroy(self) -> None:
        self.disabled = True


@pytest.fixture
def vllm_parts(monkeypatch: pytest.MonkeyPatch):
    """Put them where the sender imports them from."""
    install(monkeypatch, installed_packed_tensor())


def install(monkeypatch: pytest.MonkeyPatch, packed_tensor: Path) -> None:
    monkeypatch.setattr(Communicator, "made", [])
    monkeypatch.setattr(Communicator, "on_broadcast", staticmethod(lambda tensor: None))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    spec = importlib.util.spec_from_file_location(PACKED, packed_tensor)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, PACKED, module)
    spec.loader.exec_module(module)
    for name, attribute, value in (
        ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator", Communicator),
        ("vllm.distributed.utils", "StatelessProcessGroup", Group),
    ):
        part = types.ModuleType(name)
        setattr(part, attribute, value)
        monkeypatch.setitem(sys.modules, name, part)


class Server:
    """What the sender asks of a VllmControl. refuses: joining is an error. hangs: that many of its workers never come."""

    def __init__(self, name: str, num_workers: int = 1) -> None:
        self.address = ServerAddress(name, f"http://{name}")
        self.workers, self.version = num_workers, "default"
        self.calls: list[str] = []
        self.groups = 0
        self.refuses = False
        self.hangs = 0
        self.is_dead = False
        self.released = threading.Event()

    def leave_group(self) -> None:
        self.calls.append("leave")
        if self.is_dead:
            raise ServerError(self.address.name, "/shutdown_weight_transfer_engine", "ConnectError")
        self.groups = 0

    def num_workers(self, *, of_all_replicas: bool = True) -> int:
        return self.workers

    def weight_version(self) -> str:
        return self.version

    def join_group(self, info: dict) -> None:
        self.calls.append("join")
        if self.refuses:
            raise ServerError(self.address.name, "/init_weight_transfer_engine", "out of memory")
        self.groups += 1
        assert self.groups == 1, "vLLM would overwrite the communicator of the former group"
        failures: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                store = join_store(info["master_address"], info["master_port"], 30)
                Group(rank, info["world_size"], store).broadcast_obj(None, src=0)
                store.add("in_nccl", 1)
                while store.add("in_nccl", 0) < info["world_size"]:
                    time.sleep(0.01)
            except RuntimeError as error:
                failures.append(error)

        ranks = range(info["rank_offset"], info["rank_offset"] + self.workers - self.hangs)
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        if self.hangs:
            self.released.wait(60)
        for thread in threads:
            thread.join()
        if failures:
            raise ServerError(self.address.name, "/init_weight_transfer_engine", str(failures[0]).splitlines()[0])
