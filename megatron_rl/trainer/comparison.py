"""A step that was trained again beside what was recorded of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.trainer.fingerprint import TensorDifference

Proof = Literal["fingerprints", "checkpoint", "metrics"]


@dataclass(frozen=True)
class StepComparison:
    """`tensors` were compared by fingerprints, or with the checkpoint that follows the step, or could not be (proof 'metrics')."""

    step: int
    proof: Proof
    first: TensorDifference | None = None
    difference: float | None = None
    """Largest absolute difference within that first tensor; None where only its checksum is known."""
    num_tensors: int = 0
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Recorded and replayed, of those that differ."""
    num_metrics: int = 0

    @property
    def equal(self) -> bool:
        return self.first is None and not self.metrics

    @property
    def text(self) -> str:
        """One line for a person, and one for each metric that differs."""
        lines = [f"step {self.step}: {'equal' if self.equal else 'DIFFERS'}; {self._tensors()}; {self._metrics()}"]
        lines += [
            f"    {name}: {recorded!r} recorded, {replayed!r} replayed" for name, (recorded, replayed) in self.metrics.items()
        ]
        return "\n".join(lines)

    def _tensors(self) -> str:
        if self.proof == "metrics":
            return "no tensor is compared (there is neither a fingerprint of this layout nor a checkpoint behind the step)"
        if self.first is None:
            return f"{self.num_tensors} tensors are the same to the bit (by {self.proof})"
        by = "" if self.difference is None else f" by at most {self.difference:.3g}"
        others = f"; {self.first.num_different} of {self.num_tensors} tensors differ"
        return f"the first tensor that differs is {self.first.name} on rank {self.first.rank}{by}{others}"

    def _metrics(self) -> str:
        return (
            f"{len(self.metrics)} of {self.num_metrics} metrics differ"
            if self.metrics
            else f"{self.num_metrics} metrics are the same"
        )


def differing_metrics(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Of the names in both, those whose values are not the same to the bit. A NaN is recorded as such, and equals a NaN."""
    return {
        name: (recorded[name], value) for name, value in replayed.items() if name in recorded and not _same(recorded[name], value)
    }


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what a clock measured."""
    return {name: value for name, value in metrics.items() if not name.endswith("_s") and name != "overhead_share"}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and not math.isfinite(b))  # metrics.jsonl holds infinity and NaN alike as null
