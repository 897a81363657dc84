"""Saving and loading on the ranks."""

from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.engine.checkpoint import EngineCheckpointError
from tests.distributed.engine.cases import Run, Setting, laid_out

Weights = dict[str, Tensor]


def save_and_continue(rank: int, setting: Setting, folder: Path, sections: dict[str, Any] | None = None) -> Weights:
    """Two steps, a checkpoint, two more steps: the weights at the end. sections: of the configuration, by name."""
    with laid_out(setting) as groups:
        run = Run(groups, setting, **(sections or {}))
        for number in range(2):
            run.step(number)
        run.engine.save(folder, 2)
        for number in range(2, 4):
            run.step(number)
        return run.weights()


def resume(rank: int, setting: Setting, folder: Path) -> tuple[int, Weights]:
    """A fresh engine, the checkpoint, two more steps."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        step = run.engine.load(folder)
        for number in range(step, step + 2):
            run.step(number)
        return step, run.weights()


def broken_loads(rank: int, setting: Setting, folders: list[Path]) -> list[str]:
    """The message of each refusal."""
    found = []
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        for folder in folders:
            try:
                run.engine.load(folder)
                found.append("nothing")
            except EngineCheckpointError as error:
                found.append(str(error))
    return found


def refusals(rank: int, setting: Setting, folder: Path, other: Setting) -> list[str]:
    """Saving over it, loading half of it, loading it into another model, saving where nobody can write."""
    found = []

    def note(run: Run, action: str, *args: object) -> None:
        try:
            getattr(run.engine, action)(*args)
            found.append("nothing")
        except (EngineCheckpointError, OSError) as error:
            found.append(str(error))

    with laid_out(setting) as groups:
        run = Run(groups, setting)
        note(run, "save", folder, 2)
        note(run, "load", folder.with_name("half"))
        note(Run(groups, other), "load", folder)
        note(run, "save", folder / "metadata.json" / "below", 2)
        return found
