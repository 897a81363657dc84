"""Tensors at known places in files: their bytes are memory-mapped, and read when they are touched."""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.wire.tensor_spec import DTYPE_BYTES, TensorSpec


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    spec: TensorSpec
    start: int
    """Offset of the first byte in the file."""

    def map(self) -> Tensor:
        """The tensor, memory-mapped.

        A slice touches only its own bytes, and they leave memory with the tensor. Writing to it changes neither the file nor the
        next mapping.
        """
        if self.spec.num_bytes == 0:
            return torch.empty(self.spec.shape, dtype=self.spec.torch_dtype)
        pages, offset = map_bytes(self.file, self.start, self.spec.num_bytes)
        return tensor_in(pages, offset, self.spec)


class ReadableTensor(Protocol):
    """A tensor of a checkpoint folder, as it is stored or dequantised as it is read."""

    @property
    def file(self) -> Path:
        """The file that holds it (of a quantised tensor: its weights)."""
        ...

    @property
    def spec(self) -> TensorSpec:
        """Known from headers alone."""
        ...

    def map(self) -> Tensor:
        """The tensor, mapped from the file."""
        ...


def map_bytes(file: Path, start: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """A private mapping that holds the bytes, and their offset in it.

    One mapping for each tensor, not for each file: the kernel counts a private mapping as memory that may be needed, and refuses
    one that is larger than the machine's memory.
    """
    offset = start % mmap.ALLOCATIONGRANULARITY  # a mapping starts at a page
    with open(file, "rb") as stream:
        return mmap.mmap(stream.fileno(), offset + num_bytes, access=mmap.ACCESS_COPY, offset=start - offset), offset


def tensor_in(pages: mmap.mmap, offset: int, spec: TensorSpec) -> Tensor:
    """The tensor whose bytes begin at `offset` of a mapping."""
    found = torch.frombuffer(pages, dtype=torch.uint8, offset=offset, count=spec.num_bytes)
    if offset % DTYPE_BYTES[spec.dtype]:
        # Files of other writers may be unaligned; a typed view must be aligned.
        found = found.clone()
    return found.view(spec.torch_dtype).view(spec.shape)
