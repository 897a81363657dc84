"""A few readable rollouts of each step: RUN/rollouts/step_000012.txt."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def choose_examples(examples: Sequence[Mapping], count: int) -> list[Mapping]:
    """At most `count` of them, evenly from the best reward to the worst, both included: the extremes show most."""
    ordered = sorted(examples, key=lambda e: -e["reward"])
    places = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return [ordered[place] for place in places]


class ExamplesWriter:
    """Writes a file of rollouts a step.

    Args:
        folder: Made if it does not exist.
        count: Number of rollouts in a file.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, step: int, examples: Sequence[Mapping]) -> None:
        """Write some of a step's rollouts: mappings with prompt, completion, reward; further keys are written as they are."""
        chosen = choose_examples(examples, self.count)
        if chosen:
            (self.folder / f"step_{step:06d}.txt").write_text("\n".join(_readable(e) for e in chosen))


def _readable(example: Mapping) -> str:
    rest = {key: value for key, value in example.items() if key not in ("prompt", "completion", "reward")}
    head = "  ".join([f"reward {example['reward']:g}", *(f"{key} {value}" for key, value in rest.items())])
    return f"=== {head}\n--- prompt\n{example['prompt']}\n--- completion\n{example['completion']}\n"
