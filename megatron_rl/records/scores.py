"""What the trainer's loss saw of a few rollouts of a step: log-probs to lay beside the recorded ones."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_rl.records.atomic_file import write_atomically
from megatron_rl.records.payload import PayloadError


def write_scores(path: Path, scores: Mapping[str, np.ndarray]) -> None:
    """scores: uid to f32 [C], the trainer's log-prob of each completion token; NaN where it carries no loss."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    write_atomically(path, save(dict(scores)))


def read_scores(path: Path) -> dict[str, np.ndarray]:
    """What `write_scores` wrote; nothing where the step left no file. Raises PayloadError for a damaged one."""
    if not path.exists():
        return {}
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise PayloadError(f"{path}: not a whole file of scores ({error}); delete it, the run does not need it") from error
