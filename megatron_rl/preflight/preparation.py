"""Prepares a check: the small run, its model, its sequences, and the oracle's values for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.preflight.oracle import Oracle, check_known_to_transformers
from megatron_rl.preflight.sequences import sample_sequences, supervised_loss, write_plan
from megatron_rl.preflight.shrink import CHECK_SIZES, SAMPLING, shrunk_config, shrunk_layout, with_expert_replicas
from megatron_rl.preflight.subject import PLAIN, REPLAYED, Expected, Subject
from megatron_rl.preflight.weights import write_random_weights
from megatron_rl.records import Sampling
from megatron_rl.weight_mapping import ParameterTable, Placement
from megatron_rl.weight_mapping.shrink import shrink_model


def small_run(config: Config, hf_config: Mapping[str, Any], *, expert_replicas: bool) -> Config:
    """Makes the small run that is checked in place of the user's.

    Args:
        config: The user's run.
        hf_config: config.json of the user's model.
        expert_replicas: Whether each expert needs replicas on several ranks.

    Returns:
        The configuration with the shrunken model and layout.

    Raises:
        LayoutError: The user's layout does not fit the user's model.
        UnknownFamilyError: transformers or this program does not know the model.
    """
    check_known_to_transformers(hf_config)
    layout = config.parallel_layout
    Placement(ParameterTable(hf_config, padded_vocab_size=layout.padded_vocab_size(hf_config["vocab_size"])), layout)
    small = shrunk_layout(layout)
    model = shrink_model(hf_config, CHECK_SIZES, tensor_parallel=layout.tp)
    return shrunk_config(config, model, with_expert_replicas(small) if expert_replicas else small)


def make_subject(folder: Path, config: Config) -> tuple[Subject, dict[str, Tensor]]:
    """Writes the small model and samples its sequences.

    Args:
        folder: Where model, payloads and step plans are written.
        config: Result of `small_run`.

    Returns:
        The subject, and the oracle's gradients of the plain plan's supervised loss by checkpoint name.
    """
    write_random_weights(folder / "model", config.model.architecture or {}, seed=config.run.seed)
    oracle = Oracle(folder / "model")
    sampled = {
        PLAIN: sample_sequences(oracle, Sampling(top_p=SAMPLING.top_p, top_k=SAMPLING.top_k), seed=PLAIN, forced_experts=False),
        REPLAYED: sample_sequences(oracle, SAMPLING, seed=REPLAYED, forced_experts=True),
    }
    plans = {number: write_plan(folder, number, [s.rollout for s in scored]) for number, scored in sampled.items()}
    expected = {
        number: Expected(
            {n: s.log_probs for n, s in enumerate(scored) if len(s.log_probs)},
            {n: s.entropies for n, s in enumerate(scored) if len(s.log_probs)},
        )
        for number, scored in sampled.items()
    }
    gradients = oracle.gradients(supervised_loss(oracle, sampled[PLAIN]))
    return Subject(folder, config, plans, expected), gradients
