"""Name, shape and dtype of a tensor, without its values: one type for checkpoints, weight updates and the servers' plugin.

torch is imported inside the functions that need it: light processes import this package without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of the dtypes that checkpoints and weight updates carry, by torch's name for them (without `torch.`)."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without `torch.`, as config.json and weight updates have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it is there. Example: `TensorSpec("lm_head.weight", (151936, 2048), "bfloat16")`.

    Raises:
        ValueError: The dtype is not one of DTYPE_BYTES.
    """

    name: str
    """The Hugging Face name, in a checkpoint and in a weight update."""
    shape: tuple[int, ...]
    dtype: str
    """A key of DTYPE_BYTES. Text, because JSON carries it and light processes read it."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name!r} has dtype {self.dtype!r}; supported are {sorted(DTYPE_BYTES)}")

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor that is there."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        import torch

        return getattr(torch, self.dtype)
