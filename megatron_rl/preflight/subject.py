"""What the checks run on: a folder with the shrunken model and the sampled sequences, and what the oracle says of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import Config
from megatron_rl.conversion import HfCheckpoint
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable

PLAIN, REPLAYED = 0, 1
"""Numbers of the plans: experts as the routers choose, temperature 1; and random experts forced, another temperature."""
Scores = dict[int, np.ndarray]
"""By sequence, of its loss tokens."""


@dataclass(frozen=True)
class Expected:
    """The oracle's, of one plan."""

    log_probs: Scores
    entropies: Scores


@dataclass(frozen=True)
class Subject:
    """Goes to every rank. `config` has the shrunken model and layout."""

    folder: Path
    config: Config
    plans: Mapping[int, str]
    expected: Mapping[int, Expected]

    @property
    def model_folder(self) -> Path:
        """The folder of the small model."""
        return self.folder / "model"

    @property
    def model(self) -> dict[str, Any]:
        """config.json of the small model."""
        return self.config.model.architecture or {}

    @property
    def layout(self) -> Layout:
        """The small parallelism layout."""
        return self.config.parallel_layout

    @property
    def table(self) -> ParameterTable:
        """The small model's parameters."""
        return ParameterTable(self.model, padded_vocab_size=self.layout.padded_vocab_size(self.model["vocab_size"]))

    def weights(self) -> HfCheckpoint:
        """The small model's weights."""
        return HfCheckpoint.open(self.model_folder)
