"""A rerun step compared with what was recorded of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.trainer.fingerprint import TensorDifference

Proof = Literal["fingerprints", "checkpoint", "metrics"]


@dataclass(frozen=True)
class StepComparison:
    """What a rerun of one step gave, compared with its record."""

    step: int
    proof: Proof
    """How tensors were compared: by fingerprints, with the checkpoint after the step, or not at all ('metrics')."""
    first: TensorDifference | None = None
    """The first tensor that differs; None where none does, or none was compared."""
    difference: float | None = None
    """Largest absolute difference within that first tensor; None where only its checksum is known."""
    num_tensors: int = 0
    """Compared, of all ranks."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Name to the recorded and the rerun value, of those that differ."""
    num_metrics: int = 0
    """Compared: those in both."""

    @property
    def equal(self) -> bool:
        """Whether all that was compared is the same to the bit."""
        return self.first is None and not self.metrics

    @property
    def text(self) -> str:
        """One line for a person, and one for each metric that differs."""
        lines = [f"step {self.step}: {'equal' if self.equal else 'DIFFERS'}; {self._tensors()}; {self._metrics()}"]
        lines += [
            f"    {name}: {recorded!r} recorded, {rerun!r} in the rerun" for name, (recorded, rerun) in self.metrics.items()
        ]
        return "\n".join(lines)

    def _tensors(self) -> str:
        if self.proof == "metrics":
            return "no tensor is compared (there is neither a fingerprint of this layout nor a checkpoint after the step)"
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


def differing_metrics(recorded: Mapping[str, float], rerun: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Of the names in both, those whose values are not the same to the bit; a recorded NaN equals NaN and infinity."""
    return {
        name: (recorded[name], value) for name, value in rerun.items() if name in recorded and not _same(recorded[name], value)
    }


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a rerun must reproduce: without times and what is computed from times."""
    return {name: value for name, value in metrics.items() if not name.endswith("_s") and name != "overhead_share"}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and not math.isfinite(b))  # metrics.jsonl holds infinity and NaN alike as null
