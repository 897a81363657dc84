"""Input of the stages: a folder with the shrunken model and the sampled sequences, and the oracle's values for them."""

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
"""Numbers of the step plans: PLAIN has the routers' experts and temperature 1, REPLAYED forced random experts and another
temperature."""
Scores = dict[int, np.ndarray]
"""Values of the loss tokens, by number of the sequence."""


@dataclass(frozen=True)
class Expected:
    """The oracle's values for one step plan."""

    log_probs: Scores
    entropies: Scores


@dataclass(frozen=True)
class Subject:
    """What a check runs on. It is sent to every rank."""

    folder: Path
    config: Config
    """The run with the shrunken model and layout."""
    plans: Mapping[int, str]
    """Names of the step plans by number: PLAIN and REPLAYED."""
    expected: Mapping[int, Expected]
    """The oracle's values by number of the step plan."""

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
