"""From the log-probs of several scorings to what each accounts for."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rl.attribution.factors import Factor
from megatron_rl.attribution.record import StepRecord
from megatron_rl.attribution.scoring import ScoringOutcome

NUM_WORST = 10
UNDONE = 4.0
"""A known fault is named where undoing it leaves less than this part of the mismatch."""
EXPLAINS_TOKEN = 0.5
"""A change explains a token whose |d| it takes at least this share of."""
EXPLAINS = 0.1
"""... if it takes at least this share of the mean as well: any change brings single tokens nearer by chance."""
METRICS = ("mismatch_kl_k1", "mismatch_kl_k3", "abs_dlogp_mean", "abs_dlogp_max", "ratio_mean")
"""Names of the run's own metrics, in the order of the numbers of a Mismatch."""
AS_TRAINED, LEFT = "as trained", "everything replayed, weights that sampled"


@dataclass(frozen=True)
class Mismatch:
    """Of d = log p - log p_rollout over num_tokens loss tokens; as the metrics of the same names."""

    k1: float
    k3: float
    abs_mean: float
    abs_max: float
    ratio_mean: float
    num_tokens: int


@dataclass(frozen=True)
class FactorEffect:
    """What one change does to the mismatch."""

    name: str
    mismatch: Mismatch | None
    """With the change; None: the change does not apply, for `reason`."""
    accounts_for: float | None = None
    """Mean |d| as trained less mean |d| with the change, over the tokens that both could score.
    Negative where the change makes it larger."""
    reason: str = ""


@dataclass(frozen=True)
class WorstToken:
    """A token with a large mismatch."""

    rollout: str
    place: int
    """Among the completion's tokens."""
    position: int
    """Position in the sequence, prompt included."""
    token: int
    text: str
    set_size: int
    staleness: int
    logprob_rollout: float
    logprob_trainer: float
    explained_by: str
    """The change that takes most of its |d|, or why there is none."""
    share: float
    """Of its |d|, what that change takes; 0 where there is none."""
    with_change: Mapping[str, float]
    """|d| under each change."""


@dataclass(frozen=True)
class Attribution:
    """Where the mismatch of a step comes from."""

    step: int
    as_trained: FactorEffect
    recorded: Mapping[str, float]
    """The same numbers as the run's own metrics have them, under their names."""
    rows: tuple[FactorEffect, ...]
    left: FactorEffect
    rounding: float
    """Mean |d| of `left` that is taken for rounding."""
    hypotheses: tuple[FactorEffect, ...]
    faults: tuple[str, ...]
    worst: tuple[WorstToken, ...]
    notes: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether no fault was found and only rounding is left."""
        left = self.left.mismatch
        return not self.faults and left is not None and left.abs_mean <= self.rounding

    def as_json(self) -> dict[str, Any]:
        """What `--json` writes."""
        return asdict(self)


def measured(d: np.ndarray) -> Mismatch | None:
    """d: f64 [M]; NaN where it is not known. None where none is."""
    d = d[~np.isnan(d)]
    if not len(d):
        return None
    ratio, absolute = np.exp(d), np.abs(d)
    return Mismatch(
        k1=float(-d.mean()),
        k3=float((ratio - 1.0 - d).mean()),
        abs_mean=float(absolute.mean()),
        abs_max=float(absolute.max()),
        ratio_mean=float(ratio.mean()),
        num_tokens=len(d),
    )


def attribution(
    record: StepRecord,
    scores: Mapping[str, np.ndarray],
    factors: Sequence[Factor],
    hypotheses: Sequence[Factor],
    outcome: ScoringOutcome,
    texts: Sequence[str],
    *,
    rounding: float,
    recorded: Mapping[str, float],
    notes: Sequence[str],
) -> Attribution:
    """scores: by name of the factor, f32 [M] each, with AS_TRAINED and LEFT. texts: of each loss token."""
    d = {name: of_one.astype(np.float64) - record.logprobs for name, of_one in scores.items()}
    rows = tuple(_row(d, factor) for factor in factors)
    left = FactorEffect(LEFT, measured(d[LEFT]), _accounts_for(d[AS_TRAINED], d[LEFT]))
    were_tried = any(h.name in d for h in hypotheses)
    tried = tuple(_row({**d, AS_TRAINED: d[LEFT]}, h) for h in hypotheses if were_tried)
    named = _named(d, record, hypotheses, rounding)
    single = [row.name for row, factor in zip(rows, factors, strict=True) if factor.may_explain and _explains(row, d)]
    return Attribution(
        step=record.plan.step,
        as_trained=FactorEffect(AS_TRAINED, measured(d[AS_TRAINED]), 0.0),
        recorded=recorded,
        rows=rows,
        left=left,
        rounding=rounding,
        hypotheses=tried,
        faults=tuple(named) + _training_faults(outcome),
        worst=tuple(_worst(record, d, single, named, texts, rounding)),
        notes=tuple(notes),
    )


def _row(d: Mapping[str, np.ndarray], factor: Factor) -> FactorEffect:
    if factor.name not in d:
        return FactorEffect(factor.name, None, reason=factor.reason)
    return FactorEffect(factor.name, measured(d[factor.name]), _accounts_for(d[AS_TRAINED], d[factor.name]))


def _accounts_for(base: np.ndarray, changed: np.ndarray) -> float | None:
    both = ~(np.isnan(base) | np.isnan(changed))
    return float((np.abs(base[both]) - np.abs(changed[both])).mean()) if both.any() else None


def _named(d: Mapping[str, np.ndarray], record: StepRecord, hypotheses: Sequence[Factor], rounding: float) -> list[str]:
    """The known fault whose undoing alone leaves least, if it leaves little enough; [] where none does."""
    best: tuple[float, str] | None = None
    for hypothesis in (h for h in hypotheses if h.name in d):
        judged = ~np.isnan(d[LEFT])
        if hypothesis.scoring is not None and hypothesis.scoring.route_shift > 0:
            judged &= ~record.is_last  # its predecessor's row follows the recorded ones
        before, after = (
            float(np.abs(values[judged]).mean()) if judged.any() else np.nan for values in (d[LEFT], d[hypothesis.name])
        )
        if after <= max(rounding, before / UNDONE) and before > rounding and (best is None or after < best[0]):
            best = after, hypothesis.name
    return [best[1]] if best else []


def _training_faults(outcome: ScoringOutcome) -> tuple[str, ...]:
    names = outcome.unequal_gradients
    if not names:
        return ()
    which = "experts'" if all(".experts." in name for name in names) else "some"
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    found = (
        f"{which} gradients are not summed over the ranks that hold the same parameters: {len(names)} of "
        f"{outcome.num_gradients} differ ({shown})"
    )
    return (found,)


def _explains(row: FactorEffect, d: Mapping[str, np.ndarray]) -> bool:
    base = float(np.nanmean(np.abs(d[AS_TRAINED])))
    return row.accounts_for is not None and row.accounts_for > EXPLAINS * base


def _worst(
    record: StepRecord,
    d: Mapping[str, np.ndarray],
    single: Sequence[str],
    named: Sequence[str],
    texts: Sequence[str],
    rounding: float,
) -> list[WorstToken]:
    """The tokens with the largest |d| as trained, largest first."""
    places = np.argsort(-np.abs(d[AS_TRAINED]), kind="stable")[:NUM_WORST]
    found = []
    for m in places:
        distances = {name: abs(float(values[m])) for name, values in d.items() if not np.isnan(values[m])}
        explained_by, share = _explanation(distances, single, named, rounding)
        found.append(
            WorstToken(
                rollout=record.plan.entries[record.entry[m]].uid,
                place=int(record.place[m]),
                position=int(record.position[m]),
                token=int(record.token[m]),
                text=texts[m],
                set_size=int(record.set_size[m]),
                staleness=int(record.staleness[m]),
                logprob_rollout=float(record.logprobs[m]),
                logprob_trainer=float(record.logprobs[m] + d[AS_TRAINED][m]),
                explained_by=explained_by,
                share=share,
                with_change=distances,
            )
        )
    return found


def _explanation(
    distances: Mapping[str, float], single: Sequence[str], named: Sequence[str], rounding: float
) -> tuple[str, float]:
    """The change that explains a token, and the share of its |d| that the change takes.

    distances: |d| of the token under each change. A named fault was undone on top of LEFT, and takes what it takes from there.
    """
    base = distances[AS_TRAINED]
    if base <= rounding:
        return "rounding", 0.0
    taken = {name: base - distances[name] for name in single if name in distances}
    taken |= {name: distances[LEFT] - distances[name] for name in named if LEFT in distances}
    best = max(taken, key=taken.__getitem__, default=None)
    if best is not None and taken[best] >= EXPLAINS_TOKEN * base:
        return best, min(1.0, taken[best] / base)
    together = base - distances.get(named[0] if named else LEFT, base)
    return ("several together", together / base) if together >= EXPLAINS_TOKEN * base else ("no single change", 0.0)
