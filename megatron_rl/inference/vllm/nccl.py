"""Weights over NCCL, for servers that run vLLM's own `nccl` weight transfer engine.

Never run on hardware: written against the source of vLLM 0.30.0 (`vllm.distributed.weight_transfer`: nccl_common, nccl_engine,
packed_tensor), whose packed protocol is used as it is. Unlike the `gloo` engine, vLLM's checks neither the bytes that arrive nor
that every parameter got its own; only the probe after an update detects a bad one.
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import ServerAddress, WeightSource, checked_tensors
from megatron_rl.inference.vllm.control import VllmControl
from megatron_rl.wire.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

NUM_BUFFERS = 2
"""Buckets that NCCL may have in flight at once; part of the packed protocol, so both sides need it."""


class NcclSender:
    """See `WeightSender`. One communicator of this rank (0) and the workers of all servers, new when the set of servers changes.

    NCCL cannot leave one server out: when the stream breaks, all servers have failed.

    Args:
        host: This machine's address, as the servers reach it.
        bucket_bytes: GPU memory per buffer, on both sides.
        timeout_s: Timeout of the rendezvous, and of the complete stream.
    """

    backend = "nccl"

    def __init__(self, host: str, *, bucket_bytes: int = 1 << 30, timeout_s: float = 300.0) -> None:
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._communicator: PyNcclCommunicator | None = None
        self._members: tuple[ServerAddress, ...] = ()

    def connect(self, servers: Sequence[VllmControl]) -> dict[str, str]:
        """Keep the communicator if it has exactly these servers; otherwise make one. It forms with all of them or with none."""
        members = tuple(server.address for server in servers)
        if members == self._members and self._communicator is not None:
            return {}
        self.close()
        if not members:
            return {}
        try:
            self._communicator = self._rendezvous(servers)
        except (ServerError, RuntimeError) as error:  # torch's store and pynccl raise RuntimeErrors
            return {address.name: f"no NCCL group: {error}" for address in members}
        self._members = members
        return {}

    def _rendezvous(self, servers: Sequence[VllmControl]) -> "PyNcclCommunicator":
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        world_size = 1 + sum(server.address.num_workers for server in servers)
        place = {"master_address": self._host, "master_port": _free_port(self._host), "world_size": world_size}
        # Each side waits for the other, so all start at once; when one fails, the others run into their timeouts.
        pool = ThreadPoolExecutor(1 + len(servers))
        communicator = pool.submit(trainer_init, place)
        joining = []
        rank_offset = 1
        for server in servers:
            joining.append(pool.submit(server.join_group, place | self._protocol() | {"rank_offset": rank_offset}))
            rank_offset += server.address.num_workers
        pool.shutdown(wait=False)
        done, pending = wait((communicator, *joining), timeout=self._timeout_s, return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()
        if pending:
            raise RuntimeError(f"{len(pending)} of {world_size} members have not joined within {self._timeout_s:g} s")
        return communicator.result()

    def _protocol(self) -> dict:
        return {"packed": True, "packed_buffer_size_bytes": self._bucket_bytes, "packed_num_buffers": NUM_BUFFERS}

    def announcement(self, specs: Sequence[TensorSpec], version: int) -> dict[str, Any]:
        """The fields of vLLM's own update message."""
        return {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype for spec in specs],
            "shapes": [list(_sent_shape(spec)) for spec in specs],
        }

    def stream(self, source: WeightSource) -> dict[str, str]:
        """See `WeightSender.stream`. A broadcast waits for every member without end, so a timer aborts the communicator."""
        trouble: list[Exception] = []  # of the source itself; in vLLM's loop it would look like one of NCCL's

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                for spec, tensor in checked_tensors(source):
                    yield spec.name, tensor.reshape(_sent_shape(spec))
            except Exception as error:
                trouble.append(error)
                raise

        remaining = tensors()
        failure = self._broadcast(self._communicator, remaining) if self._communicator is not None else None
        if trouble:
            raise trouble[0]
        for _ in remaining:  # what is left, or all of it without servers: the other ranks gather it too
            pass
        return {} if failure is None else {address.name: failure for address in self._members}

    def _broadcast(self, communicator: "PyNcclCommunicator", tensors: Iterator[tuple[str, torch.Tensor]]) -> str | None:
        """Send all tensors; why it failed, or None."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        watchdog = threading.Timer(self._timeout_s, communicator.destroy)
        watchdog.daemon = True
        watchdog.start()
        try:
            packed_nccl_broadcast_producer(
                iterator=tensors,
                group=communicator,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self._bucket_bytes,
                num_buffers=NUM_BUFFERS,
            )
        except RuntimeError as error:
            return f"the NCCL stream broke: {error}"
        finally:
            watchdog.cancel()
        return None

    def confirm(self, server: VllmControl, version: int) -> None:
        """vLLM's engine keeps no version; the server's is set when the update is finished."""
        held = server.weight_version()
        if held != str(version):
            raise ServerError(server.address.name, "/weight_info", f"holds version {held!r} after the update to {version}")

    def disconnect(self, server: str) -> None:
        """Destroy the communicator if this server is in it."""
        if any(address.name == server for address in self._members):
            self.close()

    def close(self) -> None:
        """Destroy the communicator."""
        if self._communicator is not None:
            self._communicator.destroy()
        self._communicator = None
        self._members = ()


def _sent_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape, with at least one dimension: vLLM's packing views tensors as bytes, which a scalar does not allow.

    vLLM's loaders take both.
    """
    return tuple(spec.shape) or (1,)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
