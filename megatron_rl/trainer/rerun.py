"""Reruns recorded steps, one rank: `python -m megatron_rl.trainer.rerun RUN_DIR SCRATCH_DIR FIRST STEPS`.

Nothing of the run is written. Rank 0 appends a comparison for each step to SCRATCH_DIR/report.jsonl.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.batching import Spool
from megatron_rl.config import RunFolder
from megatron_rl.engine.engine import Engine
from megatron_rl.metrics import read_rows
from megatron_rl.processes import ignore_sigterm
from megatron_rl.trainer.comparison import StepComparison, comparable, differing_metrics
from megatron_rl.trainer.fingerprint import Fingerprint, TensorDifference
from megatron_rl.trainer.loop import Trainer
from megatron_rl.trainer.ranks import broadcast_object, gather_object, rendezvous_in
from megatron_rl.trainer.saving import load_checkpoint
from megatron_rl.wire.control import encode

REPORT = "report.jsonl"


def rerun(run: RunFolder, scratch: RunFolder, first: int, steps: int) -> None:
    """Train recorded step plans from the state that the run had there, and compare each step with its record; a collective.

    Args:
        run: The recorded run; only read.
        scratch: Holds the config of the rerun, and gets the report.
        first: The first step: 0, or one before which a checkpoint was kept.
        steps: Number of steps.
    """
    config = scratch.config()
    trainer = Trainer(run, config, rendezvous_in(scratch.path, config.layout.world_size), steering=None)
    trainer.begin(run.checkpoint(first) if first else None, recorded_start=True)
    for step in range(first, first + steps):
        metrics = trainer.train_plan(Spool.plan_name(step))
        comparison = compare(trainer, step, metrics)
        if comparison is not None:
            with open(scratch.path / REPORT, "ab") as report:
                report.write(encode(comparison) + b"\n")


def compare(trainer: Trainer, step: int, metrics: dict[str, float]) -> StepComparison | None:
    """Compare the step just trained with its record; a collective.

    By fingerprints where they were recorded at this layout. Where these differ or are missing, by the checkpoint after the step,
    if there is one: it is read at any layout, and shows how large a difference is.

    Args:
        trainer: Directly after the step.
        step: Counted from 0.
        metrics: Of the rerun step.

    Returns:
        The comparison on rank 0; None on the others.
    """
    own = trainer.fingerprint
    recorded = Fingerprint.read(trainer.folder.fingerprints, step) if own else None
    if recorded is not None and recorded.layout != trainer.config.layout.model_dump():
        recorded = None
    first = recorded.first_difference(own) if recorded is not None and own is not None else None
    checkpoint_after = trainer.folder.checkpoint(step + 1)
    wanted = broadcast_object((recorded is None or first is not None) and checkpoint_after.exists())
    differences = differences_from(trainer.engine, checkpoint_after) if wanted else None
    if trainer.groups.rank != 0:
        return None
    values = comparable(metrics)
    rows = {row.step: row.values for row in read_rows(trainer.folder.metrics_file)}
    differing, num_metrics = differing_metrics(rows[step], values), len(values.keys() & rows[step].keys())
    if recorded is not None:
        size = differences[first.rank].get(first.name) if first and differences else None
        return StepComparison(step, "fingerprints", first, size, recorded.num_tensors, differing, num_metrics)
    if differences is not None:
        first, size = _first_of(differences)
        return StepComparison(step, "checkpoint", first, size, sum(map(len, differences)), differing, num_metrics)
    return StepComparison(step, "metrics", metrics=differing, num_metrics=num_metrics)


@torch.no_grad()
def differences_from(engine: Engine, checkpoint: Path) -> Sequence[dict[str, float]] | None:
    """How far the state is from a checkpoint's; a collective.

    The state is unchanged afterwards. A copy is kept on the host meanwhile, so that the device needs no second one.

    Returns:
        Of each rank, tensor name to the largest absolute difference; on rank 0, None on the others.
    """
    own = {name: tensor.cpu().clone() for name, tensor in engine.state()}
    load_checkpoint(engine, checkpoint)
    found = {}
    for name, tensor in engine.state():
        found[name] = _largest(own[name], tensor.cpu())
        tensor.copy_(own[name])
    return gather_object(found)


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Infinity where either has a NaN."""
    difference = (a.double() - b.double()).abs()
    return float(torch.where(torch.isnan(difference), torch.inf, difference).max())


def _first_of(differences: Sequence[dict[str, float]]) -> tuple[TensorDifference | None, float | None]:
    different = [
        (place, rank, name, size)
        for rank, sizes in enumerate(differences)
        for place, (name, size) in enumerate(sizes.items())
        if size
    ]
    if not different:
        return None, None
    _, rank, name, size = min(different)
    return TensorDifference(name, rank, len(different)), size


def main(arguments: Sequence[str]) -> None:
    """Rerun on this rank; the arguments are those of the command above."""
    run, scratch, first, steps = arguments
    ignore_sigterm()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    rerun(RunFolder(Path(run)), RunFolder(Path(scratch)), int(first), int(steps))


if __name__ == "__main__":
    main(sys.argv[1:])
