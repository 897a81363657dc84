"""Weights over Gloo, for servers that run the `gloo` engine of `megatron_rl.inference.vllm.plugin`.

There is one group per server (rank 0 here, then the server's workers), and every bucket goes to all groups at once. With one
group for all servers a broadcast would pass through some of them on its way to the others: one that dies would fail the
update for all, every rank of the trainer would have to gather everything again, and any change of the fleet would need a new
group. The price is that this host sends every byte once per server; large fleets with GPUs use NCCL.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.inference.errors import ServerError
from megatron_rl.inference.sender import WeightSource, checked_tensors
from megatron_rl.inference.vllm.control import VllmControl
from megatron_rl.wire.stores import serve_store
from megatron_rl.wire.tensor_spec import TensorSpec
from megatron_rl.wire.weights import Bucket, WeightGroup, join_weight_group, pack_bucket, plan_buckets


class _Flight(NamedTuple):
    """A bucket on its way: the buffer, which must stay as it is until all have it, and the work of each server's group."""

    buffer: torch.Tensor | None
    works: Mapping[str, dist.Work]


class GlooSender:
    """See `WeightSender`.

    Args:
        host: This machine's address, as the servers reach it; the only one that is listened on.
        bucket_bytes: Tensors are sent together up to this size.
        timeout_s: For the rendezvous with a server, and for one bucket to reach it and the one before to be loaded.
        receive_timeout_s: How long a server waits for the next bucket. It must outlast the gathering of a bucket and the timeouts
            of other servers, which delay the stream. (A server notices at once when the sender exits.)
    """

    backend = "gloo"

    def __init__(
        self, host: str = "127.0.0.1", *, bucket_bytes: int = 64 << 20, timeout_s: float = 60.0, receive_timeout_s: float = 600.0
    ) -> None:
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._receive_timeout_s = receive_timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._num_workers: dict[str, int] = {}

    def connect(self, servers: Sequence[VllmControl]) -> dict[str, str]:
        """Make a new group with every server: it takes 15 ms, and an old one may belong to a process that has exited."""
        self.close()
        failures: dict[str, str] = {}
        if not servers:
            return failures
        with ThreadPoolExecutor(len(servers)) as pool:
            joins = {server.address.name: pool.submit(self._rendezvous, server) for server in servers}
        for name, join in joins.items():
            try:
                self._groups[name] = join.result()
            except (ServerError, RuntimeError) as error:  # torch.distributed's errors are RuntimeErrors
                failures[name] = f"no weight group: {error}"
        return failures

    def _rendezvous(self, server: VllmControl) -> WeightGroup:
        self._num_workers[server.address.name] = num_workers = server.num_workers()
        if num_workers != server.num_workers(of_all_replicas=False):
            raise ServerError(
                server.address.name,
                "/get_world_size",
                "it has data-parallel replicas, which Gloo does not reach; start it without",
            )
        store = serve_store(self._host, self._timeout_s)
        world_size = 1 + num_workers
        init_info = {"host": self._host, "port": store.port, "world_size": world_size, "timeout_s": self._receive_timeout_s}
        # Each side waits for the other, so both start at once; when one fails, the other runs into its timeout.
        pool = ThreadPoolExecutor(2)
        joining = pool.submit(server.join_group, init_info)
        group = pool.submit(join_weight_group, self._host, store.port, 0, world_size, self._timeout_s, store)
        pool.shutdown(wait=False)
        both: tuple[Future[Any], ...] = (joining, group)
        for done in wait(both, return_when=FIRST_EXCEPTION).done:
            done.result()
        return group.result()

    def announcement(self, specs: Sequence[TensorSpec], version: int) -> dict[str, Any]:
        """The fields of the plugin's `GlooUpdateInfo`."""
        return {
            "version": version,
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "bucket_bytes": self._bucket_bytes,
        }

    def stream(self, source: WeightSource) -> dict[str, str]:
        """See `WeightSender.stream`. A bucket is gathered and packed while the servers receive and load the one before."""
        failures: dict[str, str] = {}
        in_flight = _Flight(None, {})
        for bucket, tensors in _bucketed(source, self._bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            pack_bucket(bucket, tensors, buffer)
            self._land(in_flight, failures)
            in_flight = self._launch(buffer, failures)
        self._land(in_flight, failures)
        return failures

    def _launch(self, buffer: torch.Tensor, failures: dict[str, str]) -> _Flight:
        """Start to send one bucket to every server that has not failed."""
        works = {}
        for name, group in list(self._groups.items()):
            try:
                works[name] = group.broadcast(buffer)
            except RuntimeError as error:
                self._drop(name, error, failures)
        return _Flight(buffer, works)

    def _land(self, flight: _Flight, failures: dict[str, str]) -> None:
        """Wait until every server has the bucket, or has failed."""
        for name, work in flight.works.items():
            try:
                work.wait()
            except RuntimeError as error:
                self._drop(name, error, failures)

    def _drop(self, name: str, error: RuntimeError, failures: dict[str, str]) -> None:
        failures[name] = f"the stream broke: {str(error).splitlines()[0]}"
        self.disconnect(name)

    def confirm(self, server: VllmControl, version: int) -> None:
        """Ask the workers themselves: the engine sets the version only after it has checked every tensor and parameter."""
        held = [answer["version"] for answer in server.call_workers("held_version")]
        if held != [version] * self._num_workers[server.address.name]:
            raise ServerError(server.address.name, "held_version", f"the workers hold {held} after the update to {version}")

    def disconnect(self, server: str) -> None:
        """Drop its group; the other servers keep theirs."""
        self._groups.pop(server, None)

    def close(self) -> None:
        """Drop all groups."""
        self._groups.clear()


def _bucketed(source: WeightSource, bucket_bytes: int) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
    """The source's tensors by the bucket that carries them."""
    tensors = checked_tensors(source)
    for bucket in plan_buckets(source.specs, bucket_bytes):
        yield bucket, [next(tensors)[1] for _ in bucket.specs]
    for _ in tensors:  # lets the source reach its end, and the check see a surplus
        raise AssertionError("checked_tensors yields as many tensors as there are specs")
