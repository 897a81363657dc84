"""Results of a check: measurements with their bounds, by stage."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One number and its bound."""

    what: str
    value: float
    bound: float
    """Largest value that passes, or the smallest one if `at_least`."""
    at_least: bool = False
    """Whether the value must be large, which shows that the check would notice a mistake."""

    @property
    def passed(self) -> bool:
        """Whether the value is within its bound; a NaN is not."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True)
class StageResult:
    """Result of one stage."""

    name: str
    title: str
    measurements: tuple[Measurement, ...] = ()
    skipped: bool = False
    aborted: bool = False
    """Whether an error ended the stage before it had all measurements."""
    note: str = ""
    """Why the stage was skipped, or the error that aborted it."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the stage ran to its end and every number is within its bound."""
        return not self.aborted and all(m.passed for m in self.measurements)


@dataclass(frozen=True)
class CheckReport:
    """Results of all stages in their order."""

    model: dict[str, Any]
    """config.json of the small model that was run."""
    layout: dict[str, Any]
    """The small layout that was run."""
    injected_fault: str | None
    stages: tuple[StageResult, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the stages that failed."""
        return tuple(stage.name for stage in self.stages if not stage.passed)

    def as_json(self) -> dict[str, Any]:
        """What `--json` writes; the injected fault also under its former name "plant", `aborted` also as "broke_off"."""
        tree = asdict(self) | {"plant": self.injected_fault, "passed": not self.failed, "failed": list(self.failed)}
        for stage, found in zip(tree["stages"], self.stages, strict=True):
            stage["broke_off"] = found.aborted
            stage["passed"] = None if found.skipped else found.passed
            for entry, measured in zip(stage["measurements"], found.measurements, strict=True):
                entry["passed"] = measured.passed
        return tree
