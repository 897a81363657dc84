"""`megatron-rl replay`: rerun recorded steps of a run, and compare the results with what was recorded."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_rl.config import Config, ConfigError, RunFolder, load_config, to_toml
from megatron_rl.launch.local import prepare_model
from megatron_rl.orchestrator import replay_processes
from megatron_rl.processes import Child, ProcessError, stop_all
from megatron_rl.trainer.comparison import StepComparison
from megatron_rl.trainer.recorded_run import recorded_steps, starting_steps
from megatron_rl.wire.control import decode

GRACE_S = 5.0


def replay_run(run: RunFolder, overrides: Sequence[str], first: int, steps: int | None, show: Callable[[str], None]) -> bool:
    """Train the recorded steps first, first + 1, ... (`steps` of them; None: all) again; whether all came out as recorded.

    The run's folder gets a new folder under replays/, with configuration, logs and report, and is otherwise only read, so that
    a run can be looked into while it is running. Raises ConfigError when the steps are not recorded, ProcessError when a rank
    fails.
    """
    config = load_config(run.config_file, ["--run.fingerprints", "true", *overrides])
    recorded = recorded_steps(run)
    count = _steps_from(run, recorded, first, steps)
    scratch = _scratch(run, config, first)
    if overrides:
        prepare_model(scratch.config_file, None)  # a layout that does not fit is refused here, in plain words
    show(f"steps {first}..{first + count - 1} of {run.path}, trainer ranks: {config.layout.world_size}; logs: {scratch.logs}")
    compared = []
    for comparison in _comparisons(config, run, scratch, first, count):
        show(comparison.text)
        compared.append(comparison)
    return all(comparison.equal for comparison in compared)


def _steps_from(run: RunFolder, recorded: Sequence[int], first: int, steps: int | None) -> int:
    known = starting_steps(run, recorded)
    if first not in known:
        raise ConfigError(
            f"--from-step {first}: {run.path} can be rerun from {', '.join(map(str, known)) or 'no step'}: from the start, "
            "and from "
            "the kept checkpoints (checkpoint.every, checkpoint.keep) that a recorded step follows"
        )
    there = 1
    while first + there in recorded:
        there += 1
    if steps is not None and not 1 <= steps <= there:
        raise ConfigError(
            f"--steps {steps}: from step {first} on there are {there} recorded steps in a row; ask for 1 to {there}"
        )
    return there if steps is None else steps


def _scratch(run: RunFolder, config: Config, first: int) -> RunFolder:
    """A new folder for this replay, so that several can run at once."""
    run.replays.mkdir(exist_ok=True, mode=0o700)
    scratch = RunFolder(Path(tempfile.mkdtemp(prefix=f"from_{first:06d}.", dir=run.replays)))
    scratch.config_file.write_text(to_toml(config))
    return scratch


def _comparisons(config: Config, run: RunFolder, scratch: RunFolder, first: int, count: int) -> Iterator[StepComparison]:
    """One a step, as they come. However this ends, no rank is left."""
    children: list[Child] = []
    try:
        for command in replay_processes(config, run, scratch, first, count):
            children.append(Child(command))  # noqa: PERF401 - one by one, so that those are stopped that were started
        lines = 0
        while True:
            running = any(child.poll() is None for child in children)  # asked before the report is read, which is then complete
            report = _whole_lines(scratch.path / "report.jsonl")
            yield from (decode(line, StepComparison) for line in report[lines:])
            lines = len(report)
            if failed := [child for child in children if child.poll()]:
                raise ProcessError(failed[0].failure())
            if not running:
                return
            time.sleep(0.1)
    finally:
        stop_all(children, GRACE_S)


def _whole_lines(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []
