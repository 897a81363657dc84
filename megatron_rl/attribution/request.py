"""Which step is attributed, what is recorded of it, and from where its weights are reached.

All that can be refused is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.attribution.record import StepRecord, read_record
from megatron_rl.batching import Spool
from megatron_rl.config import Config, ConfigError, RunFolder, load_config
from megatron_rl.conversion.model_files import read_config
from megatron_rl.metrics import read_rows
from megatron_rl.preflight.faults import check_fault_applies
from megatron_rl.trainer.recorded_run import recorded_steps, starting_steps, starts_leading_to

ROUNDING = {"float32": 1e-4, "bfloat16": 0.02}
"""Mean |log p_trainer - log p_rollout| that arithmetic alone causes between two programs that agree, by model.dtype."""


@dataclass(frozen=True)
class AttributionRequest:
    """A recorded step that can be attributed."""

    run: RunFolder
    config: Config
    """The run's, with the overrides of the command line."""
    hf_config: Mapping[str, Any]
    record: StepRecord
    start: int
    """The step from whose weights on the recorded steps are trained again."""
    fault: str | None
    """The fault to inject, of `preflight.faults.FAULTS`."""

    @property
    def step(self) -> int:
        """The step that is attributed."""
        return self.record.plan.step

    @property
    def versions(self) -> frozenset[int]:
        """The versions whose weights the ranks have at some time: the step's own, and those among its tokens from `start` on."""
        return frozenset({self.step, *(version for version in self.record.version.tolist() if version >= self.start)})

    @property
    def rounding(self) -> float:
        """The mean |d| that is taken for rounding."""
        return ROUNDING[self.config.model.dtype]


def make_request(run: RunFolder, overrides: Sequence[str], step: int, retrain: int, fault: str | None) -> AttributionRequest:
    """Reads the record of a step and finds the weights to start from.

    Args:
        run: The folder of the run.
        overrides: Words of the command line that change the run's configuration.
        step: The step to attribute.
        retrain: The largest number of steps to train again.
        fault: The fault to inject, of `preflight.faults.FAULTS`; None for none.

    Raises:
        ConfigError: The step is not recorded or its weights cannot be reached, with the steps that can be attributed; or the
            fault does not apply to the model or the layout.
    """
    config = load_config(run.config_file, ["--run.fingerprints", "false", *overrides])
    recorded = recorded_steps(run)
    starts = starting_steps(run, recorded)
    if step not in recorded:
        raise ConfigError(_why_not_recorded(run, step, reachable_steps(starts, recorded, retrain)))
    plan = Spool(run.path).recorded(step)
    if plan is None:
        raise ConfigError(f"--step {step}: its plan or payloads were deleted while they were being read; choose a later step")
    record = read_record(Spool(run.path), plan)
    if not record.num_tokens:
        raise ConfigError(f"--step {step}: none of its rollouts has a token with a loss; choose another step")
    hf_config = read_config(run.model)
    check_fault_applies(fault, hf_config)
    if fault == "unreduced-expert-grad" and config.parallel_layout.edp == 1:
        raise ConfigError(
            f"--inject-fault {fault}: at this layout each expert is on one rank only, so that no gradient is summed over ranks; "
            "use another layout, for example --layout.world_size 2 --layout.expert 1"
        )
    oldest = int(record.version.min())
    return AttributionRequest(run, config, hf_config, record, start_of(run, step, oldest, starts, recorded, retrain), fault)


def reachable_steps(starts: Sequence[int], recorded: Sequence[int], retrain: int) -> list[int]:
    """Recorded steps whose weights are those of a starting step, or at most `retrain` recorded steps after one."""
    return [step for step in recorded if any(step - start <= retrain for start in starts_leading_to(step, starts, recorded))]


def start_of(run: RunFolder, step: int, oldest: int, starts: Sequence[int], recorded: Sequence[int], retrain: int) -> int:
    """The starting step from which the weights of a step are reached, and if possible those of its oldest version.

    Args:
        run: For the message.
        step: The step that is attributed.
        oldest: The oldest version among its tokens.
        starts: Steps before which the trainer's state is known.
        recorded: Steps that can be trained again.
        retrain: The largest number of steps to train again.

    Raises:
        ConfigError: No starting step is near enough; the message lists the steps that can be attributed.
    """
    near = [start for start in starts_leading_to(step, starts, recorded) if step - start <= retrain]
    if not near:
        possible = reachable_steps(starts, recorded, retrain)
        raise ConfigError(
            f"--step {step}: {run.path} has the weights of steps {_listed(starts) or 'none'} (the start and the kept "
            f"checkpoints: checkpoint.every, checkpoint.keep), and with --retrain {retrain} only these steps are reached from "
            f"there: {_listed(possible) or 'none'}"
        )
    return max((start for start in near if start <= oldest), default=max(near))


def _why_not_recorded(run: RunFolder, step: int, possible: Sequence[int]) -> str:
    trained = {row.step for row in read_rows(run.metrics_file)} if run.metrics_file.exists() else set()
    spool = Spool(run.path)
    if step in trained:
        why = f"the step was trained, but its plan or payloads are no longer complete in {spool.root}"
    elif spool.path(spool.plan_name(step)).exists():
        why = "the step is planned, but not trained yet; wait for it"
    else:
        done = f"the run has trained steps {min(trained)} to {max(trained)}" if trained else "the run has trained no step yet"
        why = f"{run.path} has no such step; {done}"
    return f"--step {step}: {why}; steps that can be attributed: {_listed(possible) or 'none'}"


def _listed(steps: Sequence[int]) -> str:
    """Rising numbers with ranges joined: 0..3, 7."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][-1] == step - 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{p[0]}..{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
