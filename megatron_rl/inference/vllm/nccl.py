"""Weights over NCCL, for servers that run vLLM's own `nccl` weight transfer engine.

Never run on hardware: written against the source of vLLM 0.33.0 (`vllm.distributed.weight_transfer`: nccl_common, nccl_engine,
packed_tensor), whose packed protocol is used as it is. Unlike the `gloo` engine, vLLM's checks neither the bytes that arrive nor
that every parameter got its own; only the probe after an update detects a bad one.

How a group forms. Nothing can be taken back once a member is inside ncclCommInitRank: it waits for the others without end. So
every step that can fail for one server comes before that:

    leave the former group, say how many workers there are      a call to each server, answered by all of its workers
    connect to the store                                        a worker waits there for NCCL's id
    all workers are connected                                   otherwise the store is closed, which frees those that wait;
                                                                the group is tried again without the servers that did not come
    the id is published, all enter ncclCommInitRank             a member that is lost here costs all of them
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from megatron_rl.errors import RunError
from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import ServerAddress, WeightSource, checked_tensors
from megatron_rl.inference.streams import readable_on_other_streams
from megatron_rl.inference.vllm.control import VllmControl
from megatron_rl.wire.stores import num_connections, serve_store
from megatron_rl.wire.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

T = TypeVar("T")

NUM_BUFFERS = 2
"""Buckets that NCCL may have in flight at once; part of the packed protocol, so both sides need it."""

_POLL_S = 0.02

_FREED_S = 10.0
"""Within this time a worker that waits at a store notices that it was closed, and its server answers."""


class NcclStreamError(RunError, RuntimeError):
    """The stream was aborted because it took longer than its time."""


class _NotJoinedError(RunError):
    """Servers that did not come to the rendezvous; `reasons` by name."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


class NcclSender:
    """See `WeightSender`. One communicator of this rank (0) and the workers of all servers, new when the set of servers changes.

    NCCL cannot leave one server out: when the stream breaks, all servers have failed. Before a group has formed, it can.

    Args:
        host: This machine's address, as the servers reach it; the only one that is listened on.
        bucket_bytes: GPU memory per buffer, on both sides.
        timeout_s: For the whole stream, and for NCCL to connect all members.
        join_timeout_s: For all workers to come to the rendezvous.
    """

    backend = "nccl"

    def __init__(self, host: str, *, bucket_bytes: int = 1 << 30, timeout_s: float = 300.0, join_timeout_s: float = 60.0) -> None:
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._join_timeout_s = join_timeout_s
        self._communicator: PyNcclCommunicator | None = None
        self._members: tuple[ServerAddress, ...] = ()
        self._confirmed: dict[str, int] = {}
        self._broken: dict[str, str] = {}

    def connect(self, servers: Sequence[VllmControl]) -> dict[str, str]:
        """Keep the communicator if it has exactly these servers; otherwise make one with all of them that come."""
        if self._communicator is not None and self._are_the_members(servers):
            return {}
        self.close()
        self._broken = {}
        sizes, failures = _each(servers, _leave_former_group)
        while sizes:
            members = {server: sizes[server.address.name] for server in servers if server.address.name in sizes}
            try:
                self._communicator = self._rendezvous(members)
            except _NotJoinedError as error:
                failures |= {name: f"did not join the NCCL group: {reason}" for name, reason in error.reasons.items()}
                # Those that came have left by an error, so they are asked again before the next attempt.
                sizes, lost = _each([server for server in members if server.address.name not in failures], _leave_former_group)
                failures |= lost
            except (ServerError, RuntimeError) as error:  # torch's store and pynccl raise RuntimeErrors
                return failures | {server.address.name: f"no NCCL group: {error}" for server in members}
            else:
                self._members = tuple(server.address for server in members)
                break
        return failures

    def _are_the_members(self, servers: Sequence[VllmControl]) -> bool:
        """Also that none of them was started again at its address: such a server holds no version that was confirmed here."""
        if tuple(server.address for server in servers) != self._members:
            return False
        versions, failures = _each(servers, lambda server: server.weight_version())
        return not failures and all(version == str(self._confirmed.get(name)) for name, version in versions.items())

    def _rendezvous(self, members: Mapping[VllmControl, int]) -> "PyNcclCommunicator":
        """A communicator with these servers, which have so many workers each.

        Raises:
            _NotJoinedError: Some did not come; nobody has entered NCCL.
            RuntimeError: NCCL did not connect the members.
        """
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        world_size = 1 + sum(members.values())
        listener = socket.create_server((self._host, 0))
        place = {"master_address": self._host, "master_port": listener.getsockname()[1], "world_size": world_size}
        store = serve_store(self._host, self._timeout_s, listener)
        pool = ThreadPoolExecutor(1 + len(members))
        joining: dict[str, Future[None]] = {}
        rank_offset = 1
        for server, num_workers in members.items():
            info = place | self._protocol() | {"rank_offset": rank_offset}
            joining[server.address.name] = pool.submit(server.join_group, info)
            rank_offset += num_workers
        absent = self._absent(joining, place["master_port"], world_size)
        if absent is not None:
            pool.shutdown(wait=False)
            del store  # frees the workers that wait there for the id
            waiting = wait(joining.values(), timeout=_FREED_S).not_done
            late = f"not all of its workers came within {self._join_timeout_s:g} s"
            if absent:
                late = f"another server refused, and {_FREED_S:g} s later its workers still waited for that one"
            raise _NotJoinedError({name: late for name, call in joining.items() if call in waiting} | absent)
        group = StatelessProcessGroup(rank=0, world_size=world_size, store=store)
        # The current device is a thread's own, so it is read here.
        device = torch.accelerator.current_device_index()
        communicator = pool.submit(PyNcclCommunicator, group, device=device)
        pool.shutdown(wait=False)
        done, pending = wait((communicator, *joining.values()), timeout=self._timeout_s, return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()
        if pending:
            raise RuntimeError(f"NCCL has not connected the {world_size} members within {self._timeout_s:g} s")
        return communicator.result()

    def _absent(self, joining: Mapping[str, "Future[None]"], port: int, world_size: int) -> dict[str, str] | None:
        """None once all workers are connected to the store. Otherwise name and reason of the servers that refused, if any did."""
        deadline = time.monotonic() + self._join_timeout_s
        while num_connections(port) < world_size:  # this process is connected to its own store, too
            refused = {name: str(call.exception()) for name, call in joining.items() if call.done() and call.exception()}
            if refused or time.monotonic() > deadline:
                return refused
            time.sleep(_POLL_S)
        return None

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
        """See `WeightSender.stream`. A broadcast waits for every member without end, so a timer aborts the communicator.

        Where the group broke between `connect` and here, all of its servers have failed: none of them gets anything.
        """
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
        return self._broken if failure is None else {address.name: failure for address in self._members}

    def _broadcast(self, communicator: "PyNcclCommunicator", tensors: Iterator[tuple[str, torch.Tensor]]) -> str | None:
        """Send all tensors; why it failed, or None."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        try:
            with _Watchdog(communicator, self._timeout_s) as guarded:
                packed_nccl_broadcast_producer(
                    iterator=readable_on_other_streams(tensors),
                    group=guarded,
                    src=0,
                    post_iter_func=lambda item: item[1],
                    buffer_size_bytes=self._bucket_bytes,
                    num_buffers=NUM_BUFFERS,
                )
        except RuntimeError as error:
            return f"the NCCL stream broke: {error}"
        return None

    def confirm(self, server: VllmControl, version: int) -> None:
        """vLLM's engine keeps no version; the server's is set when the update is finished."""
        held = server.weight_version()
        if held != str(version):
            raise ServerError(server.address.name, "/weight_info", f"holds version {held!r} after the update to {version}")
        self._confirmed[server.address.name] = version

    def disconnect(self, server: str) -> None:
        """Destroy the communicator if this server is in it. The workers of the others are members until they join anew."""
        if any(address.name == server for address in self._members):
            reason = f"server {server}, a member of the same NCCL group, failed before the stream began"
            self._broken = {address.name: reason for address in self._members}
            self.close()

    def close(self) -> None:
        """Destroy the communicator."""
        if self._communicator is not None:
            self._communicator.destroy()
        self._communicator = None
        self._members = ()
        self._confirmed.clear()


class _Watchdog:
    """The communicator as vLLM's producer uses it, aborted when the stream takes longer than its time.

    An aborted communicator's broadcast returns without a word, and so does the producer. Here the next broadcast raises, and so
    does the end of the `with` block.

    Raises:
        NcclStreamError: It was aborted.
    """

    def __init__(self, communicator: "PyNcclCommunicator", timeout_s: float) -> None:
        self._communicator, self._timeout_s = communicator, timeout_s
        self._lock = threading.Lock()
        self._is_over = self._is_aborted = False
        self._timer = threading.Timer(timeout_s, self._abort)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:  # a timer that fires at this moment either counts or does nothing
            self._is_over = True
        self._timer.cancel()
        if kind is None:
            self._check()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """On the current stream; NCCL waits for the members there, not here."""
        self._check()
        self._communicator.broadcast(tensor, src=src)

    def _abort(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_aborted = True
        self._communicator.destroy()

    def _check(self) -> None:
        if self._is_aborted:
            raise NcclStreamError(
                f"aborted after {self._timeout_s:g} s: a server did not receive. Its log says why; if the servers are only slow, "
                "raise weight_sync.timeout_s"
            )


def _leave_former_group(server: VllmControl) -> int:
    """Returns the number of workers. vLLM overwrites the communicator of a group that it joined before without destroying it."""
    server.leave_group()
    return server.num_workers()


def _each(servers: Sequence[VllmControl], call: Callable[[VllmControl], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Call all servers at the same time; results and reasons of failure by name."""
    results: dict[str, T] = {}
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        calls = {server.address.name: pool.submit(call, server) for server in servers}
    for name, future in calls.items():
        try:
            results[name] = future.result()
        except ServerError as error:
            failures[name] = str(error)
    return results, failures


def _sent_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape, with at least one dimension: vLLM's packing views tensors as bytes, which a scalar does not allow.

    vLLM's loaders take both.
    """
    return tuple(spec.shape) or (1,)
