"""What the parts of a trainer rank share."""

from typing import Protocol

from megatron_rl.batching import AssemblyOptions, Spool
from megatron_rl.config import Config, RunFolder
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.trainer.steering import Steering


class TrainerRank(Protocol):
    """One rank of a run, as its supervised start and its prober see it."""

    folder: RunFolder
    config: Config
    groups: ParallelGroups
    engine: Engine
    spool: Spool
    options: AssemblyOptions
    steering: Steering | None
    """Rank 0's client of the orchestrator; None on the others."""
