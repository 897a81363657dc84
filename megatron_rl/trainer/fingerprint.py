"""Checksums of the state after a step, so that a rerun of the step can name the first tensor that differs.

    RUN/fingerprints/step_000012.json     after step 12, of each rank: tensor name to checksum of its part; parameters and
                                          optimizer state

A checksum reads each byte of the state once, on the device; nothing but the checksums is sent or written.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.records import write_atomically
from megatron_rl.wire.weights import tensor_checksum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor, in the order of the model and then of the ranks, that is not the same, and how many are not."""

    name: str
    rank: int
    num_different: int


@dataclass(frozen=True)
class Fingerprint:
    """The checksums of all ranks' tensors after one step."""

    step: int
    layout: Mapping[str, Any]
    """The layout section that the step was trained at: at another one, the ranks hold other parts."""
    ranks: tuple[Mapping[str, str], ...]
    """Of each rank: tensor name to 16 hexadecimal digits, in the order of its model."""

    @property
    def num_tensors(self) -> int:
        """Of all ranks together."""
        return sum(map(len, self.ranks))

    def first_difference(self, other: "Fingerprint") -> TensorDifference | None:
        """The first tensor that differs; None where all are the same. Both are of one layout."""
        different = [
            (place, rank, name)
            for rank, (own, others) in enumerate(zip(self.ranks, other.ranks, strict=True))
            for place, name in enumerate({**own, **others})
            if own.get(name) != others.get(name)
        ]
        if not different:
            return None
        _, rank, name = min(different)
        return TensorDifference(name, rank, len(different))

    def write(self, folder: Path) -> None:
        """Write the step's file in the run's folder of fingerprints."""
        folder.mkdir(exist_ok=True, mode=0o700)
        write_atomically(_file(folder, self.step), json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, folder: Path, step: int) -> "Fingerprint | None":
        """The fingerprint of a step; None where none was recorded."""
        file = _file(folder, step)
        if not file.exists():
            return None
        found = json.loads(file.read_bytes())
        return cls(found["step"], found["layout"], tuple(found["ranks"]))


def checksums(state: Iterable[tuple[str, "Tensor"]]) -> dict[str, str]:
    """Of one rank's tensors, by name."""
    return {name: f"{tensor_checksum(tensor) % 2**64:016x}" for name, tensor in state}


def _file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.json"
