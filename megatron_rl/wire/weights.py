"""What sender and receiver of a weight update must agree on: bucket layout, checksum, and the Gloo group that carries them.

One update is a sequence of buckets. A bucket is one flat byte buffer, sent by one broadcast: its tensors one after another, each
at an aligned offset, followed by one 64-bit checksum per tensor. Both sides derive the buckets from the same list of
`TensorSpec`, so the wire carries no headers, and many small tensors cost one round trip.

torch is imported inside the functions that need it: the orchestrator imports this package without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_rl.errors import RunError
from megatron_rl.wire.stores import address_towards, join_store
from megatron_rl.wire.tensor_spec import TensorSpec, dtype_name

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

NO_VERSION = -1
"""The policy version of a server that no update has reached yet (it was started on dummy weights or from disk)."""

ALIGNMENT = 64
"""Every tensor of a bucket starts at a multiple of this many bytes, so that it can be viewed in its own dtype."""

CHECKSUM_BLOCK = 1 << 15
"""Words hashed at a time: temporaries of 256 KiB stay in a core's cache, which doubles the speed (1 GB/s on one core)."""

# Two odd constants with evenly spread bits (the golden ratio's, and one of MurmurHash3's finalizer), as signed 64-bit integers.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER = 0xFF51AFD7ED558CCD - (1 << 64)


@dataclass(frozen=True)
class Bucket:
    """The contents of one broadcast: tensor i starts at byte `offsets[i]`, its checksum (int64) at `checksums_offset + 8 * i`."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    checksums_offset: int
    num_bytes: int


class ChecksumError(RunError):
    """Tensors whose bytes are not those that were sent; `names` lists them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(f"checksum mismatch in {list(names)}: the bytes received are not the bytes sent; send the update again")


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cut the tensors, in order, into buckets of at most `bucket_bytes` of tensor data; a larger tensor gets its own bucket.

    Every tensor is in exactly one bucket.

    Raises:
        ValueError: A name occurs twice (vLLM counts the elements that it has loaded, so it would hide a missing tensor),
            or bucket_bytes is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive")
    seen: set[str] = set()
    groups: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"weight {spec.name!r} occurs twice in one update; every name must be sent once")
        seen.add(spec.name)
        size = _aligned(spec.num_bytes)
        if not groups or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    return [_bucket_of(tuple(group)) for group in groups]


def _bucket_of(specs: tuple[TensorSpec, ...]) -> Bucket:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += _aligned(spec.num_bytes)
    return Bucket(specs, tuple(offsets), checksums_offset=end, num_bytes=end + 8 * len(specs))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def tensor_checksum(tensor: torch.Tensor) -> int:
    """64 bits over the tensor's bytes and their positions, the same on every device.

    Each 8-byte word is offset by its position and put through a bijection (xor-shift, odd multiply, xor-shift); the results are
    added modulo 2**64. So a change of one word is always seen, two words that change places or any other change with a
    probability of 1 - 2**-64. Shape and dtype are not covered: the metadata carry them.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total, words = flat.numel(), _as_words(flat)
    ramp = torch.arange(min(CHECKSUM_BLOCK, words.numel()), device=words.device) * _STRIDE
    for start in range(0, words.numel(), CHECKSUM_BLOCK):
        block = words[start : start + CHECKSUM_BLOCK]
        mixed = block + ramp[: block.numel()]
        mixed += _signed((start + 1) * _STRIDE)
        mixed ^= (mixed >> 32) & 0xFFFFFFFF  # the mask makes torch's arithmetic shift a logical one; otherwise bits get lost
        mixed *= _MULTIPLIER
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        total += int(mixed.sum())
    return _signed(total)


def _as_words(flat: torch.Tensor) -> torch.Tensor:
    """The bytes as int64, the last word filled up with zeros (the length, which is part of the sum, marks where it ends)."""
    import torch

    remainder = flat.numel() % 8
    if remainder:
        flat = torch.nn.functional.pad(flat, (0, 8 - remainder))
    elif flat.storage_offset() % 8:
        flat = flat.clone()  # a view in a wider dtype needs an aligned start
    return flat.view(torch.int64)


def _signed(value: int) -> int:
    """`value` modulo 2**64, as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def pack_bucket(bucket: Bucket, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy tensors and their checksums into the bucket's buffer.

    Args:
        bucket: What goes where.
        tensors: In the order of `bucket.specs`, on any device.
        buffer: u8 [bucket.num_bytes], on the CPU.

    Raises:
        ValueError: A tensor is not what its spec announces.
    """
    import torch

    for spec, offset, tensor in zip(bucket.specs, bucket.offsets, tensors, strict=True):
        if dtype_name(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise ValueError(
                f"weight {spec.name!r} was announced as {spec.dtype} {list(spec.shape)} but is {tensor.dtype} "
                f"{list(tensor.shape)}; the receiver has laid out its buffers by the announcement"
            )
        buffer[offset : offset + spec.num_bytes].view(tensor.dtype).view(spec.shape).copy_(tensor.detach())
    checksums = torch.tensor([tensor_checksum(tensor) for tensor in tensors], dtype=torch.int64)
    buffer[bucket.checksums_offset : bucket.num_bytes].copy_(checksums.view(torch.uint8))


def unpack_bucket(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Name of every tensor and a view of it in `buffer`.

    Raises:
        ChecksumError: The bytes of a tensor are not those that were sent.
    """
    import torch

    tensors = []
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        flat = buffer[offset : offset + spec.num_bytes]
        tensors.append((spec.name, flat.view(spec.torch_dtype).view(spec.shape)))
    sent = buffer[bucket.checksums_offset : bucket.num_bytes].clone().view(torch.int64).tolist()
    wrong = [name for (name, tensor), checksum in zip(tensors, sent, strict=True) if tensor_checksum(tensor) != checksum]
    if wrong:
        raise ChecksumError(wrong)
    return tensors


class WeightGroup:
    """A Gloo group of one sender (rank 0) and the workers of one server, apart from the default group of either process."""

    def __init__(self, store: dist.TCPStore, group: dist.ProcessGroupGloo) -> None:
        self._store = store  # must outlive the group
        self._group = group

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Start to send `buffer` from rank 0 to all others. `wait()` on the result raises where a peer has exited or hangs."""
        return self._group.broadcast(buffer, 0)  # type: ignore[attr-defined]  # torch's stubs leave it out


def join_weight_group(
    host: str, port: int, rank: int, world_size: int, timeout_s: float, store: dist.TCPStore | None = None
) -> WeightGroup:
    """Join the group whose store is at (host, port); returns when all members are connected.

    Args:
        host: Where rank 0 serves the store.
        port: The store's.
        rank: 0 sends, the others receive.
        world_size: Number of members.
        timeout_s: A longer wait raises, here and in every later broadcast.
        store: On rank 0 what it serves (`wire.stores.serve_store`); the others connect to it.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = join_store(host, port, timeout_s)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
    options._timeout = timeout
    # Gloo's default is the address of the machine's host name, which may be unreachable or open to others.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
    return WeightGroup(store, dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, options))
