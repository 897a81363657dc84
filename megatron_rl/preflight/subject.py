"""What the checks run on: a folder with the shrunken model and the sampled sequences, and what the oracle says of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.conversion import HfCheckpoint
from megatron_rl.layouts import ParameterTable, Placement
from megatron_rl.preflight.oracle import Oracle, check_known_to_transformers
from megatron_rl.preflight.sequences import sample_sequences, supervised_loss, write_plan
from megatron_rl.preflight.shrink import SAMPLING, shrunk_config, shrunk_layout, shrunk_model, with_expert_replicas
from megatron_rl.preflight.weights import write_random_weights
from megatron_rl.records import Sampling
from megatron_rl.topology import Layout

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
        return self.folder / "model"

    @property
    def model(self) -> dict[str, Any]:
        return self.config.model.architecture or {}

    @property
    def layout(self) -> Layout:
        return self.config.parallel

    @property
    def table(self) -> ParameterTable:
        return ParameterTable(self.model, padded_vocab_size=self.layout.padded_vocab_size(self.model["vocab_size"]))

    def weights(self) -> HfCheckpoint:
        return HfCheckpoint.open(self.model_folder)


def small_run(config: Config, hf_config: Mapping[str, Any], *, expert_replicas: bool) -> Config:
    """The run to check. ValueError where the user's own layout does not fit the user's own model, or nobody knows the model."""
    check_known_to_transformers(hf_config)
    layout = config.parallel
    Placement(ParameterTable(hf_config, padded_vocab_size=layout.padded_vocab_size(hf_config["vocab_size"])), layout)
    small = shrunk_layout(layout)
    return shrunk_config(config, shrunk_model(hf_config, layout), with_expert_replicas(small) if expert_replicas else small)


def make_subject(folder: Path, config: Config) -> tuple[Subject, dict[str, Tensor]]:
    """Write model and sequences into `folder`; config: of `small_run`. Also the oracle's gradients of the plain plan's supervised loss."""
    write_random_weights(folder / "model", config.model.architecture or {}, seed=config.run.seed)
    oracle = Oracle(folder / "model")
    sampled = {
        PLAIN: sample_sequences(oracle, Sampling(top_p=SAMPLING.top_p, top_k=SAMPLING.top_k), seed=PLAIN, forced_experts=False),
        REPLAYED: sample_sequences(oracle, SAMPLING, seed=REPLAYED, forced_experts=True),
    }
    plans = {number: write_plan(folder, number, [s.rollout for s in scored]) for number, scored in sampled.items()}
    expected = {
        number: Expected(
            {n: s.log_probs for n, s in enumerate(scored) if len(s.log_probs)}, {n: s.entropies for n, s in enumerate(scored) if len(s.log_probs)}
        )
        for number, scored in sampled.items()
    }
    gradients = oracle.gradients(supervised_loss(oracle, sampled[PLAIN]))
    return Subject(folder, config, plans, expected), gradients
