"""The orchestrator of a Slurm job: `python -m megatron_rl.launch.slurm_job RUN_DIR`.

The batch script starts it next to the agents. Every attempt of the job (Slurm requeues it) continues from the latest checkpoint,
the first one from the start.
"""

import asyncio
import json
import signal
import sys
import traceback
from pathlib import Path

from megatron_rl.batching import Spool
from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.errors import RunError, UserError
from megatron_rl.launch.builds import check_builds, installed_builds
from megatron_rl.launch.cluster import ClusterMachines
from megatron_rl.launch.local import prepare_model, text_notes
from megatron_rl.launch.run import run
from megatron_rl.records import write_atomically
from megatron_rl.wire.nodes import job_attempt

FINISHED, FINAL, REQUEUE = 0, 2, 75
"""Exit statuses. REQUEUE (EX_TEMPFAIL of sysexits.h): the batch script requeues the job."""

STOP = signal.SIGUSR2
"""From `megatron-rl stop`: exit without a requeue. USR1 (time limit) and TERM (preemption): exit, to be requeued."""


def run_attempt(folder: RunFolder) -> int:
    """One attempt of the job; returns its exit status.

    Raises:
        RunError: The next attempt may succeed.
    """
    config = folder.config()
    check_builds(config, installed_builds())
    with folder.claimed():
        count_attempt(folder, config.slurm.max_attempts_without_checkpoint)
        notes = text_notes(prepare_model(folder.config_file, folder))
        Spool(folder.path).create()
        machines = ClusterMachines(config, folder, job_attempt())
        signals = (signal.SIGUSR1, STOP, signal.SIGTERM)
        end = asyncio.run(run(config, folder, machines, resume=True, stop_signals=signals, notes=notes))
    return FINISHED if end.finished or end.signal == STOP else REQUEUE


def count_attempt(folder: RunFolder, most: int) -> None:
    """Record that an attempt begins.

    Args:
        folder: Of the run.
        most: Attempts without a further checkpoint.

    Raises:
        ConfigError: The last `most` attempts have all begun at the step where this one does.
    """
    latest = folder.latest_checkpoint()
    step = latest[0] if latest else 0
    # The key "lives" is the number of attempts; runs of version 0.1 have it.
    last = json.loads(folder.attempts_file.read_text()) if folder.attempts_file.exists() else {"step": step, "lives": 0}
    number = last["lives"] + 1 if last["step"] == step else 1
    if number > most:
        raise ConfigError(
            f"the last {most} attempts of this job have all begun at step {step} and ended without a further checkpoint "
            f"(slurm.max_attempts_without_checkpoint): see {folder.logs}/events.log; "
            f"`megatron-rl launch {folder.config_file} --resume` submits the run again"
        )
    write_atomically(folder.attempts_file, json.dumps({"step": step, "lives": number}).encode())


def main() -> int:
    """The program. By its exit status the batch script requeues the job or not."""
    folder = RunFolder(Path(sys.argv[1]))
    try:
        return run_attempt(folder)
    except UserError as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return FINAL
    except RunError as error:
        print(f"megatron-rl: the run failed: {error}", file=sys.stderr)
        return REQUEUE
    except Exception:  # noqa: BLE001 - the outermost frame
        traceback.print_exc()  # into the job's log
        return FINAL


if __name__ == "__main__":
    sys.exit(main())
