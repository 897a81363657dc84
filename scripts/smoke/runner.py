"""Runs steps, each as processes of its own with a log, and says of each what came of it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_rl.processes.gpus import Gpu
from scripts.smoke.steps import Step

NUMBERS = "GPU_SMOKE_NUMBERS"
"""Names the file that a step's tests add their numbers to: a line of JSON for each (tests/gpu/conftest.py)."""

_GRACE_S = 10.0


@dataclass(frozen=True)
class Verdict:
    """What came of a step."""

    step: str
    what: str
    verdict: str
    """pass, fail or skipped."""
    reason: str = ""
    """Why it failed or was skipped."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""
    """The file to send."""

    @property
    def line(self) -> str:
        """For a terminal."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.numbers.items())
        text = f"{self.verdict:<8} {self.step:<21} {self.seconds:5.0f} s  {self.what}"
        return text + "".join(f"\n{'':9}{part}" for part in (numbers, self.reason, self.log and f"log: {self.log}") if part)


def run_steps(
    wanted: Sequence[Step],
    folder: Path,
    gpus: Sequence[Gpu],
    limit_s: float,
    show: Callable[[Verdict], None],
    announce: Callable[[str], None] = lambda line: None,
) -> list[Verdict]:
    """All steps in their order, as far as the time suffices.

    Args:
        wanted: The steps.
        folder: Takes the logs.
        gpus: Those of the machine.
        limit_s: For all of them together; what would begin later is skipped.
        show: Called with each verdict as soon as it is there.
        announce: Called with a line before each step that runs.
    """
    end = time.monotonic() + limit_s
    verdicts: list[Verdict] = []
    for step in wanted:
        reason = why_skipped(step, gpus, verdicts) or ("" if time.monotonic() < end else f"the {limit_s:.0f} s are over")
        if not reason:
            announce(f"running  {step.name}: {step.what}")
        verdict = Verdict(step.name, step.what, "skipped", reason) if reason else run_step(step, folder, end - time.monotonic())
        verdicts.append(verdict)
        show(verdict)
    (folder / "verdicts.json").write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    return verdicts


def why_skipped(step: Step, gpus: Sequence[Gpu], verdicts: Sequence[Verdict]) -> str:
    """The reason, or nothing where the step can run."""
    if len(gpus) < step.gpus:
        there = f"there {'is' if len(gpus) == 1 else 'are'} {len(gpus) or 'none'}"
        return f"needs {step.gpus} GPU{'s' if step.gpus > 1 else ''}; {there}"
    lacking = [gpu for gpu in gpus if not gpu.has_fp4]
    if step.needs_fp4 and lacking:
        capability = ".".join(map(str, lacking[0].compute_capability))
        return f"needs FP4 (compute capability 10.0); {lacking[0].name} has {capability}"
    if step.after and not any(v.verdict == "pass" for v in verdicts if v.step in step.after):
        return f"looks at what {' or '.join(step.after)} leaves, and none of these passed"
    return ""


def run_step(step: Step, folder: Path, remaining_s: float) -> Verdict:
    """Run its commands until one fails, then read its numbers.

    Args:
        step: The step; nothing that it needs is missing.
        folder: Takes its log.
        remaining_s: It may take no longer, nor longer than its own limit.
    """
    log, numbers_file = folder / f"{step.name}.log", folder / f"{step.name}.numbers"
    numbers_file.unlink(missing_ok=True)
    start, limit_s = time.monotonic(), min(step.limit_s, remaining_s)
    reason = ""
    log.write_text("")
    for command in step.commands:
        reason = _failure(command, log, numbers_file, start + limit_s - time.monotonic())
        if reason:
            break
    numbers = _recorded(numbers_file)
    if not reason and step.read is not None:
        run = next((run for name in step.runs if (run := folder / "runs" / name).joinpath("metrics.jsonl").exists()), None)
        if run is None:
            reason = f"left no metrics of {' or '.join(step.runs)}"
        else:
            numbers |= step.read(run)
            log.open("a").write(f"numbers of {run}: {numbers}\n")
    seconds = time.monotonic() - start
    return Verdict(step.name, step.what, "fail" if reason else "pass", reason, numbers, seconds, str(log))


def _failure(command: Sequence[str], log: Path, numbers_file: Path, limit_s: float) -> str:
    """Why the command failed, or nothing. Its whole process group has ended then."""
    environment = {**os.environ, NUMBERS: str(numbers_file), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout=max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            _end(process)
            return f"has not ended within {limit_s:.0f} s"
        except BaseException:
            _end(process)
            raise
    if status == 0:
        return ""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"ended with status {status}: {said[-1][-300:]}"


def _end(process: subprocess.Popen) -> None:
    """SIGINT first: a run ends its own servers and ranks then."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _recorded(file: Path) -> dict[str, float]:
    if not file.exists():
        return {}
    return {name: value for line in file.read_text().splitlines() for name, value in json.loads(line).items()}
