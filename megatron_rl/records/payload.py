"""Rollouts of one group as one safetensors file: written by a worker, read slice by slice by the trainer's ranks."""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megatron_rl.config.sampling import Sampling
from megatron_rl.errors import RunError
from megatron_rl.records.atomic_file import write_atomically
from megatron_rl.records.ragged import RaggedIds
from megatron_rl.records.rollout import Rollout

_DTYPES = {
    "prompt_ids": np.int32,
    "completion_ids": np.int32,
    "logprobs": np.float32,
    "policy_versions": np.int32,
    "loss_mask": np.bool_,
}
"""Fields of a Rollout that a file holds under their own names. It also holds routed_experts, of any dtype, and the keep-sets, as
keep_ids and keep_offsets."""


class PayloadError(RunError, OSError):
    """A payload file that cannot be read: missing, incomplete, or not what its step plan says."""


def write_payload(path: Path, rollouts: Sequence[Rollout]) -> int:
    """Write the rollouts of one group to one file, which is complete as soon as it has its name.

    Each array is a tensor named `{number of the rollout}.{field}`; uid, sampling, finish_reason and reward are JSON in the file's
    metadata, under 'rollouts'.

    Returns:
        Size of the file in bytes.
    """
    tensors: dict[str, np.ndarray] = {}
    scalars: list[dict[str, Any]] = []
    for i, r in enumerate(rollouts):
        arrays: dict[str, np.ndarray] = {
            name: np.ascontiguousarray(getattr(r, name), dtype=dtype) for name, dtype in _DTYPES.items()
        }
        arrays["keep_ids"] = np.ascontiguousarray(r.keep_sets.ids, dtype=np.int32)
        arrays["keep_offsets"] = np.ascontiguousarray(r.keep_sets.offsets, dtype=np.int64)
        arrays["routed_experts"] = np.ascontiguousarray(r.routed_experts)
        tensors |= {f"{i}.{name}": array for name, array in arrays.items()}
        scalars.append(
            {"uid": r.uid, "sampling": asdict(r.sampling), "finish_reason": r.finish_reason, "reward": float(r.reward)}
        )
    data = save(tensors, metadata={"rollouts": json.dumps(scalars)})
    write_atomically(path, data)
    return len(data)


class Payload:
    """A payload file, opened for reading; `rollout(i)` reads one record, and of its routes only the MoE layers asked for."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its metadata.

        Raises:
            PayloadError: The file is missing or incomplete.
        """
        self.path = path
        try:
            self._file = safe_open(path, framework="np")
            self._scalars = json.loads(self._file.metadata()["rollouts"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, struct.error) as error:
            raise PayloadError(f"{path}: not a complete payload file ({error}); its rollouts have to be sampled again") from error

    def __len__(self) -> int:
        return len(self._scalars)

    def rollout(self, index: int, moe_layers: Sequence[int] | None = None) -> Rollout:
        """Read one record.

        Args:
            index: From 0.
            moe_layers: The MoE layers to read routes of, as positions in the payload; None reads all.

        Raises:
            PayloadError: The file has no such record, array or MoE layer.
        """
        if not 0 <= index < len(self):
            raise PayloadError(f"{self.path}: record {index} was asked for, the file holds {len(self)}")
        scalars = dict(self._scalars[index])
        scalars["sampling"] = Sampling(**scalars["sampling"])
        try:
            arrays: dict[str, Any] = {name: self._file.get_tensor(f"{index}.{name}") for name in _DTYPES}
            keep_sets = RaggedIds(self._file.get_tensor(f"{index}.keep_ids"), self._file.get_tensor(f"{index}.keep_offsets"))
            return Rollout(**scalars, **arrays, keep_sets=keep_sets, routed_experts=self._routes(index, moe_layers))
        except SafetensorError as error:
            raise PayloadError(
                f"{self.path}: record {index} lacks an array or a MoE layer that was asked for ({error})"
            ) from error

    def _routes(self, index: int, moe_layers: Sequence[int] | None) -> np.ndarray:
        if moe_layers is None:
            return self._file.get_tensor(f"{index}.routed_experts")
        stored = self._file.get_slice(f"{index}.routed_experts")
        if not len(moe_layers):
            return np.zeros((stored.get_shape()[0], 0, stored.get_shape()[2]), dtype=np.uint8)
        first, last = min(moe_layers), max(moe_layers)
        return stored[:, first : last + 1][:, [n - first for n in moe_layers]]
