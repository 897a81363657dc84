"""What a check found: numbers with what they had to be, by stage."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One number. `value` has to be at most `bound`, or at least, where it shows that a mistake would not go unnoticed."""

    what: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """A NaN passes nothing."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True)
class StageResult:
    """`name` is what a failure is called by. note: why it was not run, or how it broke off."""

    name: str
    title: str
    measurements: tuple[Measurement, ...] = ()
    skipped: bool = False
    broke_off: bool = False
    note: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the stage ran to its end and every number is within its bound."""
        return not self.broke_off and all(m.passed for m in self.measurements)


@dataclass(frozen=True)
class CheckReport:
    """Of all stages, in their order. model, layout: the small ones that were run."""

    model: dict[str, Any]
    layout: dict[str, Any]
    injected_fault: str | None
    stages: tuple[StageResult, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the stages that failed."""
        return tuple(stage.name for stage in self.stages if not stage.passed)

    def as_json(self) -> dict[str, Any]:
        """What `--json` writes; the injected fault also under its former name, "plant"."""
        tree = asdict(self) | {"plant": self.injected_fault, "passed": not self.failed, "failed": list(self.failed)}
        for stage, found in zip(tree["stages"], self.stages, strict=True):
            stage["passed"] = None if found.skipped else found.passed
            for entry, measured in zip(stage["measurements"], found.measurements, strict=True):
                entry["passed"] = measured.passed
        return tree
