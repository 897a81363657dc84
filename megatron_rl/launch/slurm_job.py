"""The orchestrator of a Slurm job: `python -m megatron_rl.launch.slurm_job RUN_DIR`, which the batch script starts beside the agents.

Every life of the job goes on from the latest checkpoint, the first one from none.
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from megatron_rl.batching import Spool
from megatron_rl.config import ConfigError, RunFolder
from megatron_rl.errors import RunError, UserError
from megatron_rl.launch.cluster import ClusterMachines
from megatron_rl.launch.local import prepare_model
from megatron_rl.launch.run import run
from megatron_rl.records import write_atomically

FINISHED, FINAL, GO_ON = 0, 2, 75
"""Exit statuses. GO_ON (EX_TEMPFAIL of sysexits.h): the batch script requeues the job."""

STOP = signal.SIGUSR2
"""From `megatron-rl stop`: leave for good. By USR1 (time limit) and TERM (preemption) the run leaves to come back."""


def live(folder: RunFolder) -> int:
    """One life of the job; returns its exit status. Raises RunError where the next attempt may succeed."""
    config = folder.config()
    with folder.claimed():
        count_life(folder, config.slurm.max_lives_without_checkpoint)
        prepare_model(folder.config_file, folder)
        Spool(folder.path).create()
        machines = ClusterMachines(config, folder, os.environ["MEGATRON_RL_LIFE"])
        end = asyncio.run(run(config, folder, machines, resume=True, stop_signals=(signal.SIGUSR1, STOP, signal.SIGTERM)))
    return FINISHED if end.finished or end.signal == STOP else GO_ON


def count_life(folder: RunFolder, most: int) -> None:
    """Remember that a life begins. Raises ConfigError when the last `most` of them have all begun where this one does."""
    latest = folder.latest_checkpoint()
    step = latest[0] if latest else 0
    lives = json.loads(folder.lives_file.read_text()) if folder.lives_file.exists() else {"step": step, "lives": 0}
    number = lives["lives"] + 1 if lives["step"] == step else 1
    if number > most:
        raise ConfigError(
            f"the last {most} lives of this job have all begun at step {step} and left no further checkpoint (slurm.max_lives_without_checkpoint): "
            f"see {folder.logs}/events.log; `megatron-rl launch {folder.config_file} --resume` starts anew"
        )
    write_atomically(folder.lives_file, json.dumps({"step": step, "lives": number}).encode())


def main() -> int:
    folder = RunFolder(Path(sys.argv[1]))
    try:
        return live(folder)
    except UserError as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return FINAL
    except RunError as error:
        print(f"megatron-rl: the run failed: {error}", file=sys.stderr)
        return GO_ON
    except Exception:
        traceback.print_exc()  # into the job's log
        return FINAL


if __name__ == "__main__":
    sys.exit(main())
