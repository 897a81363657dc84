"""Single rollouts, token by token, from a run's spool and from the scores that the trainer wrote."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from tokenizers import Tokenizer

from megatron_rl.batching import Spool, SpoolError
from megatron_rl.config import RunFolder
from megatron_rl.records import PayloadError, Rollout, read_scores

SHOWN_IDS = 64
"""Most ids of a keep-set that are shown; of the others only the number."""


@dataclass(frozen=True)
class ShownToken:
    """One completion token. Example: '7', of a keep-set of 3 ids, sampled by version 4."""

    text: str
    rollout_logprob: float | None  # None: no loss
    trainer_logprob: float | None  # None: no loss, or no scores were kept
    set_size: int
    keep_set: tuple[str, ...]
    version: int
    routes: tuple[tuple[int, ...], ...]  # of each MoE layer, at the position that predicted the token


@dataclass(frozen=True)
class ShownRollout:
    """One rollout on the page."""

    step: int
    uid: str
    reward: float
    advantage: float
    finish_reason: str
    prompt: str
    tokens: tuple[ShownToken, ...]

    def as_json(self) -> dict:
        """Plain values for the page's script."""
        return asdict(self)


def shown_rollouts(folder: RunFolder, steps: Sequence[int], remark: Callable[[str], None]) -> Iterator[ShownRollout]:
    """Reads the rollouts whose scores were kept.

    Steps without records are left out; damaged ones are left out with a remark.

    Args:
        folder: The run's folder.
        steps: The steps to read.
        remark: Called with one line for each damaged step.

    Returns:
        An iterator over the rollouts.
    """
    spool, tokenizer = Spool(folder.path), open_tokenizer(folder, remark)
    for step in steps:
        plan_name = Spool.plan_name(step)
        if not spool.path(plan_name).exists():
            continue
        try:
            plan, scores = spool.read_plan(plan_name), read_scores(folder.scores_file(step))
            entries = [entry for entry in plan.entries if entry.uid in scores and spool.path(entry.file).exists()]
            rollouts = [spool.payload(entry.file).rollout(entry.index) for entry in entries]
        except (SpoolError, PayloadError) as error:
            remark(f"{folder.path}: no rollouts of step {step} are shown: {error}")
            continue
        for entry, rollout in zip(entries, rollouts, strict=True):
            yield _shown(rollout, step, entry.advantage, scores[entry.uid], tokenizer)


def _shown(rollout: Rollout, step: int, advantage: float, scores: np.ndarray, tokenizer: Tokenizer | None) -> ShownRollout:
    first = len(rollout.prompt_ids) - 1  # the position that predicts the first completion token
    tokens = []
    for place, kept in enumerate(rollout.keep_sets):
        trained = bool(rollout.loss_mask[place])
        tokens.append(
            ShownToken(
                text=text_of(tokenizer, rollout.completion_ids[place : place + 1]),
                rollout_logprob=float(rollout.logprobs[place]) if trained else None,
                trainer_logprob=float(scores[place]) if trained and place < len(scores) else None,
                set_size=len(kept),
                keep_set=tuple(text_of(tokenizer, [token]) for token in kept[:SHOWN_IDS]),
                version=int(rollout.policy_versions[place]),
                routes=tuple(tuple(layer) for layer in rollout.routed_experts[first + place].tolist()),
            )
        )
    prompt = text_of(tokenizer, rollout.prompt_ids)
    return ShownRollout(step, rollout.uid, rollout.reward, advantage, rollout.finish_reason, prompt, tuple(tokens))


def open_tokenizer(folder: RunFolder, remark: Callable[[str], None]) -> Tokenizer | None:
    """The model's tokenizer; None where it has no tokenizer.json, or one that cannot be read, which is a remark."""
    path = folder.model / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.exists() else None
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        remark(f"{path}: cannot be read as a tokenizer ({error}); token ids are shown in place of text")
        return None


def text_of(tokenizer: Tokenizer | None, ids: Sequence[int] | np.ndarray) -> str:
    """Text of some ids; the ids as numbers if there is no tokenizer."""
    numbers = [int(token) for token in ids]
    return tokenizer.decode(numbers, skip_special_tokens=False) if tokenizer else " ".join(map(str, numbers))
