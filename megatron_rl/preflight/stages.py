"""The stages, one function each. Tolerances allow for fp32 sums in another order."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.conversion import HfCheckpoint, hf_tensors, hf_to_megatron, megatron_to_hf
from megatron_rl.engine.rank_pool import RankPool
from megatron_rl.preflight import ranks
from megatron_rl.preflight.faults import injected_fault
from megatron_rl.preflight.results import Measurement
from megatron_rl.preflight.subject import PLAIN, REPLAYED, Scores, Subject
from megatron_rl.weight_mapping import HeldParameter, Placement, TensorMismatchError

LOG_PROB = 2e-5
"""Absolute. Logits of size 10 after four layers have an error of about 1e-6 on each side of a difference."""
LOSS = 1e-5
"""Relative to the larger of the loss and 1: a sum weighted by advantages may cancel to almost 0."""
GRADIENT = 1e-4
"""Difference of each parameter's gradient, relative to the gradient's norm."""
STEP = 0.1
"""In learning rates. AdamW's first step is the sign of the gradient, except for gradients as small as its epsilon."""
RATIO = 1e-4
NOTICED = 1e-2
"""Log-probs differ by at least this much when one replay is left out or wrong."""
KEPT_MASS = 1e-3
"""Top-p removes at least this mass; otherwise the comparison could not show whether keep-sets are replayed."""


def conversion(subject: Subject, layout_pool: RankPool, fault: str | None) -> list[Measurement]:
    """Converts Hugging Face to Megatron and back, bit by bit: through checkpoints, each rank's shards, and running ranks.

    Args:
        subject: The small model and its sequences.
        layout_pool: Processes for the ranks of the subject's layout.
        fault: Fault to inject; None injects nothing.

    Returns:
        Number of tensors that differ, for each of the three ways.
    """
    given = dict(subject.weights())
    with injected_fault(fault):
        through_files, through_shards = _through_checkpoints(subject), _through_shards(subject)
    through_ranks = layout_pool.run(ranks.loaded_weights, subject, subject.config, fault)[0]
    return [
        Measurement(f"tensors that differ after HF -> {way} -> HF, of {len(given)}", _num_different(found, given), 0)
        for way, found in (("dist-checkpoint", through_files), ("shards", through_shards), ("running ranks", through_ranks))
    ]


def forward(
    subject: Subject, expected_gradients: Mapping[str, Tensor], single_rank: RankPool, fault: str | None
) -> list[Measurement]:
    """Compares one rank in fp32 with transformers in float64, over keep-sets, with the experts that the routers choose.

    Args:
        subject: The small model and its sequences.
        expected_gradients: The oracle's gradients of the supervised loss, by checkpoint name.
        single_rank: Processes for one rank.
        fault: Fault to inject; None injects nothing.

    Returns:
        Differences of log-probs, entropies and gradients.
    """
    found = single_rank.run(ranks.forward, subject, _on_one_rank(subject), fault)[0]
    wanted = subject.expected[PLAIN]
    return [
        Measurement("|log p - transformers'|, largest", _largest(found.log_probs, wanted.log_probs), LOG_PROB),
        Measurement("|entropy - transformers'|, largest", _largest(found.entropies, wanted.entropies), LOG_PROB),
        Measurement(
            "|gradient - transformers'|, largest of a parameter, relative",
            _of_gradients(found.gradients, expected_gradients),
            GRADIENT,
        ),
    ]


def layout(subject: Subject, single_rank: RankPool, layout_pool: RankPool, fault: str | None) -> list[Measurement]:
    """Compares the user's layout with one rank without recomputation: the run's objective, both replays, one optimizer step.

    Args:
        subject: The small model and its sequences.
        single_rank: Processes for one rank.
        layout_pool: Processes for the ranks of the subject's layout.
        fault: Fault to inject; None injects nothing.

    Returns:
        Differences of loss, log-probs, gradients and updated weights.
    """
    wanted = single_rank.run(ranks.step, subject, _on_one_rank(subject), fault)[0]
    answers = layout_pool.run(ranks.step, subject, subject.config, fault)
    found = answers[0]
    moved = _worst(float((found.weights[name] - weight).abs().max()) for name, weight in wanted.weights.items())
    return [
        Measurement("|loss - one rank's|, relative", abs(found.loss - wanted.loss) / max(1.0, abs(wanted.loss)), LOSS),
        Measurement(
            "|log p - one rank's|, largest", _largest(_of_all_ranks([a.log_probs for a in answers]), wanted.log_probs), LOG_PROB
        ),
        Measurement(
            "|gradient - one rank's|, largest of a parameter, relative",
            _of_gradients(found.gradients, wanted.gradients),
            GRADIENT,
        ),
        Measurement("|weight - one rank's| after a step, in learning rates", moved / ranks.LEARNING_RATE, STEP),
    ]


def replay(subject: Subject, layout_pool: RankPool, fault: str | None) -> list[Measurement]:
    """Compares the user's layout with the recorded log-probs, and shows that they differ if any replay is left out.

    Args:
        subject: The small model and its sequences.
        layout_pool: Processes for the ranks of the subject's layout.
        fault: Fault to inject; None injects nothing.

    Returns:
        Differences with all replays, which must be small, and with one of them missing or wrong, which must be large.
    """
    answers = layout_pool.run(ranks.replays, subject, subject.config, fault)

    def scores(name: str) -> Scores:
        return _of_all_ranks([getattr(a, name) for a in answers])

    recorded = subject.expected[REPLAYED].log_probs
    right = scores("right")
    found = [
        Measurement("recorded experts, keep-sets, temperature: |log p - recorded|, largest", _largest(right, recorded), LOG_PROB),
        Measurement("the same: |mean ratio - 1|", abs(_mean_ratio(right, recorded) - 1), RATIO),
        Measurement(
            "temperature left out: |log p - recorded|, largest", _largest(scores("without_temperature"), recorded), NOTICED, True
        ),
        Measurement(
            "keep-sets left out: 1 - mean ratio", 1 - _mean_ratio(scores("without_keep_sets"), recorded), KEPT_MASS, True
        ),
    ]
    if answers[0].wrong_experts is not None:
        found.append(
            Measurement("other experts: |log p - recorded|, largest", _largest(scores("wrong_experts"), recorded), NOTICED, True)
        )
    return found


def _on_one_rank(subject: Subject) -> Config:
    """The same run on one rank, without recomputation."""
    tree = subject.config.model_dump()
    tree["layout"] = {"world_size": 1}
    tree["trainer"]["recompute"] = "none"
    return Config.model_validate(tree)


def _through_checkpoints(subject: Subject) -> dict[str, Tensor]:
    with TemporaryDirectory(dir=subject.folder) as scratch:
        megatron, back = Path(scratch) / "megatron", Path(scratch) / "hf"
        hf_to_megatron(subject.model_folder, megatron)
        megatron_to_hf(megatron, back)
        return {name: tensor.clone() for name, tensor in HfCheckpoint.open(back).items()}


def _through_shards(subject: Subject) -> dict[str, Tensor]:
    """The weights, sharded by the layout and assembled again; {} if the shards do not fit."""
    table, weights = subject.table, subject.weights()
    placement = Placement(table, subject.layout)
    held: list[dict[str, HeldParameter]] = [
        {h.parameter.name: h for h in placement.held_by(rank).values() if not h.is_tied_copy}
        for rank in range(subject.layout.world_size)
    ]
    with suppress(TensorMismatchError):
        return dict(hf_tensors(table, lambda p: [held[owner][p.name].shard_from_hf(weights) for owner in placement.owners(p)]))
    return {}


def _num_different(found: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> int:
    return sum(
        name not in found or name not in given or not torch.equal(found[name], given[name])
        for name in found.keys() | given.keys()
    )


def _of_all_ranks(parts: Sequence[Scores]) -> Scores:
    """Merges the ranks' scores; ranks of one replica have the same sequences."""
    return {number: values for part in parts for number, values in part.items()}


def _largest(found: Scores, wanted: Scores) -> float:
    """Largest absolute difference; infinite where sequences are missing."""
    if found.keys() != wanted.keys():
        return float("inf")
    return _worst(float(np.abs(found[number].astype(np.float64) - values).max()) for number, values in wanted.items())


def _mean_ratio(found: Scores, recorded: Scores) -> float:
    """Mean of p / recorded p over all loss tokens."""
    if found.keys() != recorded.keys():
        return float("nan")
    return float(np.exp(np.concatenate([found[n].astype(np.float64) - values for n, values in recorded.items()])).mean())


def _of_gradients(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest difference of a parameter, relative to its norm; an expert without tokens has gradient 0 in both."""
    if not wanted.keys() <= found.keys():
        return float("inf")
    return _worst(float((found[name] - w).double().norm() / w.double().norm().clamp(min=1e-9)) for name, w in wanted.items())


def _worst(values: Iterable[float]) -> float:
    """The largest value; NaN if any is NaN, which Python's max may ignore."""
    return float(np.max(list(values)))
