"""`megatron-rl replay`: rerun recorded steps of a run, and compare the results with the recorded ones."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_rl.config import Config, RunFolder, load_config, to_toml
from megatron_rl.launch.local import prepare_model
from megatron_rl.orchestrator import devices_for, ranks_plan, replay_processes
from megatron_rl.processes import Child, ProcessError, stop_all
from megatron_rl.trainer.comparison import StepComparison
from megatron_rl.trainer.recorded_run import num_steps_from
from megatron_rl.wire.control import decode

GRACE_S = 5.0
LEAVE_S = 10.0
"""How long the other ranks of one that failed have to write into their logs why they end."""
_LEFT_ALONE = "Connection closed by peer"
"""Gloo's words in the log of a rank whose peer has ended."""


def replay_run(run: RunFolder, overrides: Sequence[str], first: int, steps: int | None, show: Callable[[str], None]) -> bool:
    """Rerun recorded steps and compare each with its record.

    The run's folder gets a new folder under replays/, with configuration, logs and report, and is otherwise only read, so that
    a run can be examined while it is running.

    Args:
        run: The folder of the run.
        overrides: Words of the command line that change the run's configuration.
        first: The first step.
        steps: Their number; None: all recorded ones.
        show: Called with each line for the user.

    Returns:
        Whether every step gave what was recorded.

    Raises:
        ConfigError: The steps are not recorded.
        ProcessError: A rank failed.
    """
    config = load_config(run.config_file, ["--run.fingerprints", "true", *overrides])
    count = num_steps_from(run, first, steps)
    scratch = _scratch(run, config, first)
    if overrides:
        prepare_model(scratch.config_file, None)  # a layout that does not fit is refused here, with a message for the user
    show(f"steps {first}..{first + count - 1} of {run.path}, trainer ranks: {config.layout.world_size}; logs: {scratch.logs}")
    compared = []
    for comparison in _comparisons(config, run, scratch, first, count):
        show(comparison.text)
        compared.append(comparison)
    return all(comparison.equal for comparison in compared)


def _scratch(run: RunFolder, config: Config, first: int) -> RunFolder:
    """A new folder for this replay, so that several can run at once."""
    run.replays.mkdir(exist_ok=True, mode=0o700)
    scratch = RunFolder(Path(tempfile.mkdtemp(prefix=f"from_{first:06d}.", dir=run.replays)))
    scratch.config_file.write_text(to_toml(config))
    return scratch


def _comparisons(config: Config, run: RunFolder, scratch: RunFolder, first: int, count: int) -> Iterator[StepComparison]:
    """Yield one for each step, as they arrive. Stops all ranks however it ends."""
    children: list[Child] = []
    try:
        plan = ranks_plan(config, "replay", devices_for(config))
        for command in replay_processes(config, run, scratch, plan, first, count):
            children.append(Child(command))  # noqa: PERF401 - one by one, so that those that were started are stopped
        lines = 0
        while True:
            running = any(child.poll() is None for child in children)  # before the report is read, which is then complete
            report = _complete_lines(scratch.path / "report.jsonl")
            yield from (decode(line, StepComparison) for line in report[lines:])
            lines = len(report)
            if any(child.poll() for child in children):
                raise ProcessError(first_cause(children))
            if not running:
                return
            time.sleep(0.1)
    finally:
        stop_all(children, GRACE_S)


def first_cause(ranks: Sequence[Child], wait_s: float = LEAVE_S) -> str:
    """Why ranks have failed: of one that ended by itself, and not because another had left it alone.

    Args:
        ranks: Of which one has failed. The others find out, and get some time to end.
        wait_s: That time.
    """
    deadline = time.monotonic() + wait_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    failures = [rank.failure() for rank in ranks if rank.poll()]
    return next((failure for failure in failures if _LEFT_ALONE not in failure), failures[0])


def _complete_lines(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []
