"""The spool: a run's payloads and step plans on a filesystem that orchestrator, workers and trainer share.

    RUN/spool/rollouts/g000012.safetensors     written by workers, one file a group
    RUN/spool/plans/step_000012.json           written by the orchestrator; also probe_000012.json

Names inside plans, summaries and messages are relative to RUN/spool, so that a run's folder can be moved.
"""

import math
from pathlib import Path
from typing import Literal, get_args

from megatron_rl.errors import RunError
from megatron_rl.records import Payload, PayloadError, StepPlan, write_atomically
from megatron_rl.wire.control import decode, encode

PlanKind = Literal["step", "probe"]


class SpoolError(RunError, OSError):
    """A plan or a name that the spool cannot read or write; the message names the file."""


class Spool:
    """The spool of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.root = Path(run_dir) / "spool"
        self.rollouts = self.root / "rollouts"
        self.plans = self.root / "plans"

    def create(self) -> None:
        """Make the folders, private to the user."""
        for folder in (self.root, self.rollouts, self.plans):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, name: str) -> Path:
        """The file of a name in a plan or a message.

        Raises:
            SpoolError: The name leads out of the spool.
        """
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise SpoolError(f"{name!r} is not the name of a file in {self.root}")
        return path

    @staticmethod
    def payload_name(uid: str) -> str:
        """Name of the payload file of a group. Example: 'g000012' gives 'rollouts/g000012.safetensors'."""
        return f"rollouts/{uid}.safetensors"

    def payload(self, name: str) -> Payload:
        """Open the payload file of that name.

        Raises:
            PayloadError: The file is missing or incomplete.
        """
        return Payload(self.path(name))

    @staticmethod
    def plan_name(step: int, kind: PlanKind = "step") -> str:
        """Name of a plan file. Example: 12 gives 'plans/step_000012.json'."""
        return f"plans/{kind}_{step:06d}.json"

    def write_plan(self, plan: StepPlan, kind: PlanKind = "step") -> str:
        """Write the plan atomically.

        Returns:
            The plan's name.

        Raises:
            SpoolError: A number of the plan is not finite.
        """
        name = self.plan_name(plan.step, kind)
        _check_finite(plan, name)
        write_atomically(self.path(name), encode(plan))
        return name

    def read_plan(self, name: str) -> StepPlan:
        """Read the plan of a name that `write_plan` returned.

        Raises:
            SpoolError: The file is missing, incomplete or foreign.
        """
        path = self.path(name)
        kind, _, number = path.stem.partition("_")
        if kind not in get_args(PlanKind) or not (number.isascii() and number.isdigit()):
            raise SpoolError(f"{name!r}: plan files are named KIND_NUMBER.json, with KIND one of {', '.join(get_args(PlanKind))}")
        try:
            plan = decode(path.read_bytes(), StepPlan)
        except OSError as error:
            raise SpoolError(f"{path}: the plan cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise SpoolError(f"{path}: not a complete plan ({error}); the step has to be planned again") from error
        if plan.step != int(number):
            raise SpoolError(f"{path}: the file holds the plan of step {plan.step}")
        return plan

    def recorded(self, step: int) -> StepPlan | None:
        """The plan of a step, where it and all its payloads are there and complete, so that the step can be rerun; else None."""
        try:
            return self._complete(step)
        except (SpoolError, PayloadError):
            return None

    def fault(self, step: int) -> str:
        """Why a step that was planned cannot be rerun, naming the file; '' where it can, or was never planned."""
        try:
            self._complete(step)
        except (SpoolError, PayloadError) as error:
            return str(error)
        return ""

    def _complete(self, step: int) -> StepPlan | None:
        name = self.plan_name(step)
        if not self.path(name).exists():
            return None
        plan = self.read_plan(name)
        held = {file: len(self.payload(file)) for file in {entry.file for entry in plan.entries}}
        for entry in plan.entries:
            if entry.index >= held[entry.file]:
                raise PayloadError(
                    f"{self.path(entry.file)}: holds {held[entry.file]} rollouts; {entry.uid} should be number {entry.index}"
                )
        return plan

    def forget(self, before_step: int) -> int:
        """Delete the plans of the steps and probes before this one, and their payloads, which no other plan has.

        A plan is deleted after its payloads, so that what a killed process leaves is found again.

        Returns:
            Number of deleted files.
        """
        deleted = 0
        for path in [path for kind in ("step", "probe") for path in self.plans.glob(f"{kind}_*.json")]:
            if int(path.stem.partition("_")[2]) >= before_step:
                continue
            files = {self.path(entry.file) for entry in self.read_plan(f"plans/{path.name}").entries}
            for file in (*files, path):
                file.unlink(missing_ok=True)
            deleted += len(files) + 1
        return deleted

    def clean_half_written(self) -> int:
        """Delete the staging files of writers that died, and return their number; only while no writer is at work."""
        left = [*self.rollouts.glob(".*.part"), *self.plans.glob(".*.part")]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)


def _check_finite(plan: StepPlan, name: str) -> None:
    """A NaN advantage would be trained on, and only be seen after the step."""
    numbers = {f"the advantage of {e.uid}": e.advantage for e in plan.entries} | plan.summary
    wrong = [f"{what} = {value}" for what, value in numbers.items() if not math.isfinite(value)]
    if wrong:
        raise SpoolError(f"{name}: the numbers of a plan must be finite; found {'; '.join(wrong)}")
