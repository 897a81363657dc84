"""Which steps of a run can be rerun, read from its folder."""

from collections.abc import Sequence

from megatron_rl.batching import Spool
from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.metrics import read_rows


def recorded_steps(run: RunFolder) -> list[int]:
    """Steps that were trained and whose plan and payloads are complete in the spool; in rising order."""
    if not run.metrics_file.exists():
        return []
    spool = Spool(run.path)
    return [row.step for row in read_rows(run.metrics_file) if spool.recorded(row.step) is not None]


def starting_steps(run: RunFolder, recorded: Sequence[int]) -> list[int]:
    """Recorded steps before which the trainer's state is known: the run's start and the kept checkpoints."""
    config = run.config()
    starts = [0] if not config.supervised.steps or run.supervised_seal.exists() else []
    return sorted({*starts, *(step for step, _ in run.complete_checkpoints())} & set(recorded))


def starts_leading_to(step: int, starts: Sequence[int], recorded: Sequence[int]) -> list[int]:
    """Starting steps from which all steps to `step` are recorded."""
    there = set(recorded)
    return [start for start in starts if start <= step and all(n in there for n in range(start, step))]


def num_steps_from(run: RunFolder, first: int, steps: int | None) -> int:
    """How many recorded steps a rerun does.

    Args:
        run: The folder of the run.
        first: The step that the rerun begins with.
        steps: The number that was asked for; None: all recorded ones up to the first gap.

    Raises:
        ConfigError: The trainer's state before `first` is not known, or fewer steps are recorded; the message lists what is.
    """
    recorded = recorded_steps(run)
    known = starting_steps(run, recorded)
    if first not in known:
        raise ConfigError(
            f"--from-step {first}: {run.path} can be rerun from {', '.join(map(str, known)) or 'no step'}: from the start, "
            "and from the kept checkpoints (checkpoint.every, checkpoint.keep) that a recorded step follows"
        )
    there = 1
    while first + there in recorded:
        there += 1
    if steps is not None and not 1 <= steps <= there:
        raise ConfigError(
            f"--steps {steps}: from step {first} on there are {there} recorded steps in a row; ask for 1 to {there}"
        )
    return there if steps is None else steps
