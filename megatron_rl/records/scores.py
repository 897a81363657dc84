"""What the trainer's loss saw of a few rollouts of a step: log-probs to compare with the recorded ones."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_rl.records.atomic_file import write_atomically
from megatron_rl.records.payload import PayloadError


def write_scores(path: Path, scores: Mapping[str, np.ndarray]) -> None:
    """Write the scores of one step as safetensors.

    Args:
        path: The step's file in RUN/scores.
        scores: uid to f32 [C], the trainer's log-prob of each completion token in nats; NaN where it carries no loss.
            Example: {"g000012.3": [-0.22, nan, 0.0]}.
    """
    path.parent.mkdir(exist_ok=True, mode=0o700)
    write_atomically(path, save(dict(scores)))


def read_scores(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_scores` wrote; {} where the step left no file.

    Raises:
        PayloadError: The file is damaged.
    """
    if not path.exists():
        return {}
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise PayloadError(f"{path}: not a complete file of scores ({error}); delete it: the run does not need it") from error
