"""Buckets, checksums and the weight group: what both sides of a weight update must agree on."""

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_rl.wire.stores import serve_store
from megatron_rl.wire.tensor_spec import DTYPE_BYTES, TensorSpec
from megatron_rl.wire.weights import (
    ALIGNMENT,
    CHECKSUM_BLOCK,
    ChecksumError,
    join_weight_group,
    pack_bucket,
    plan_buckets,
    tensor_checksum,
    unpack_bucket,
)

MASK = (1 << 64) - 1


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bytes seen as `dtype`: every bit pattern may occur, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = DTYPE_BYTES[str(dtype).removeprefix("torch.")]
    high = 2 if dtype == torch.bool else 256
    flat = torch.randint(0, high, (int(torch.Size(shape).numel()) * num_bytes,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8))


def reference_checksum(data: bytes) -> int:
    """The definition, in Python integers: no torch, no blocks, no device."""
    total = len(data)
    padded = data + bytes(-len(data) % 8)
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little")
        mixed = (word + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        mixed ^= mixed >> 32
        mixed = (mixed * 0xFF51AFD7ED558CCD) & MASK
        mixed ^= mixed >> 29
        total = (total + mixed) & MASK
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 4096, 8 * CHECKSUM_BLOCK - 3, 8 * CHECKSUM_BLOCK + 5, 16 * CHECKSUM_BLOCK])
def test_checksum_is_its_definition(num_bytes):
    tensor = random_tensor(torch.uint8, (num_bytes,))
    assert tensor_checksum(tensor) == reference_checksum(bytes(tensor.tolist()))


def test_every_single_bit_flip_is_seen():
    tensor = random_tensor(torch.uint8, (45,))
    original = tensor_checksum(tensor)
    for byte in range(45):
        for bit in range(8):
            flipped = tensor.clone()
            flipped[byte] ^= 1 << bit
            assert tensor_checksum(flipped) != original, (byte, bit)


@pytest.mark.parametrize("distance", [1, 2, 3, 1024])
def test_swapped_elements_are_seen(distance):
    """Also those that differ in the sign only: a sum weighted by the position, without mixing, would not see such a swap."""
    for element in range(20):
        tensor = torch.randn(2048 + 20, generator=torch.Generator().manual_seed(element))
        tensor[element + 2 * distance] = -tensor[element]
        swapped = tensor.clone()
        swapped[element], swapped[element + 2 * distance] = tensor[element + 2 * distance], tensor[element]
        assert tensor_checksum(swapped) != tensor_checksum(tensor)


def test_checksum_reads_values_not_storage():
    tensor = random_tensor(torch.bfloat16, (33, 17))
    assert tensor_checksum(tensor.t().contiguous().t()) == tensor_checksum(tensor)
    assert tensor_checksum(tensor[3:, :]) == tensor_checksum(tensor[3:, :].clone())  # a view that starts at an odd address
    assert tensor_checksum(torch.zeros(8)) != tensor_checksum(torch.zeros(9))


def test_random_bucket_plans_keep_their_invariants():
    draw = random.Random(0)
    for _ in range(50):
        specs = [
            TensorSpec(f"w{i}", tuple(draw.randrange(0, 9) for _ in range(draw.randrange(0, 4))), draw.choice(list(DTYPE_BYTES)))
            for i in range(draw.randrange(0, 40))
        ]
        limit = draw.randrange(1, 2000)
        buckets = plan_buckets(specs, limit)
        assert [spec for bucket in buckets for spec in bucket.specs] == specs
        for bucket in buckets:
            ends = [offset + spec.num_bytes for offset, spec in zip(bucket.offsets, bucket.specs, strict=True)]
            assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
            assert all(end <= start for end, start in zip(ends, [*bucket.offsets[1:], bucket.checksums_offset], strict=True))
            assert bucket.num_bytes == bucket.checksums_offset + 8 * len(bucket.specs)
            assert bucket.checksums_offset <= limit or sum(spec.num_bytes > 0 for spec in bucket.specs) == 1


def test_bucket_plan_refuses_what_would_go_wrong():
    with pytest.raises(ValueError, match="'a' occurs twice"):
        plan_buckets([TensorSpec(name, (2,), "float32") for name in "aba"], 1 << 20)
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        plan_buckets([], 0)
    with pytest.raises(ValueError, match="'complex64'"):
        TensorSpec("a", (2,), "complex64")


def packed(tensors: dict[str, torch.Tensor]):
    specs = [TensorSpec.of(name, t) for name, t in tensors.items()]
    (bucket,) = plan_buckets(specs, 1 << 20)
    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    pack_bucket(bucket, list(tensors.values()), buffer)
    return bucket, buffer


def test_bucket_round_trip_of_every_dtype():
    tensors = {name: random_tensor(getattr(torch, name), (3, 5), seed) for seed, name in enumerate(DTYPE_BYTES)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "strided": random_tensor(torch.float32, (7, 3)).t()}
    bucket, buffer = packed(tensors)
    for name, tensor in unpack_bucket(bucket, buffer):
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
        assert same_bytes(tensor, tensors[name]), name


def test_damage_in_a_bucket_is_named():
    tensors = {name: random_tensor(torch.bfloat16, (5, 3), seed) for seed, name in enumerate("abc")}
    bucket, buffer = packed(tensors)
    buffer[bucket.offsets[1] + 7] ^= 4
    with pytest.raises(ChecksumError, match=r"\['b'\]") as caught:
        unpack_bucket(bucket, buffer)
    assert caught.value.names == ("b",)


def test_a_tensor_other_than_announced_is_refused():
    bucket, buffer = packed({"a": torch.zeros(2, 3)})
    for tensor in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"'a' was announced as float32 \[2, 3\]"):
            pack_bucket(bucket, [tensor], buffer)


def listening_addresses() -> set[str]:
    """The local addresses (hexadecimal, as the kernel prints them) at which this process listens."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                addresses.add(local.split(":")[0])
    return addresses


def test_group_carries_a_broadcast_and_listens_on_loopback_only():
    before = listening_addresses()
    store = serve_store("127.0.0.1", timeout_s=20)
    with ThreadPoolExecutor(2) as pool:
        receivers = [pool.submit(join_weight_group, "127.0.0.1", store.port, rank, 3, 20) for rank in (1, 2)]
        groups = [join_weight_group("127.0.0.1", store.port, 0, 3, 20, store), *(receiver.result() for receiver in receivers)]
    assert listening_addresses() - before <= {"0100007F"}  # 127.0.0.1
    sent = random_tensor(torch.uint8, (1000,))
    buffers = [sent.clone(), torch.empty_like(sent), torch.empty_like(sent)]
    for work in [group.broadcast(buffer) for group, buffer in zip(groups, buffers, strict=True)]:
        work.wait()
    assert all(torch.equal(buffer, sent) for buffer in buffers)


def test_nobody_is_waited_for_without_end():
    store = serve_store("127.0.0.1", timeout_s=1)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        join_weight_group("127.0.0.1", store.port, 0, 2, 1, store)
    assert time.monotonic() - started < 30  # well below Gloo's own 30 minutes, whatever the machine is busy with


def test_no_torch_without_need():
    """The orchestrator, which has no torch, imports the server's command line and this package."""
    code = "import sys, megatron_rl.wire.weights, megatron_rl.inference.vllm.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
