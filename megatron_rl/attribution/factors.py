"""What is changed, one thing at a time: which changes apply to a run, and which known faults are tried."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.attribution.record import StepRecord
from megatron_rl.attribution.scoring import Scoring
from megatron_rl.config import Config, layout_values
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ModelArchitecture, ParameterTable, Placement

DROPOUT = 0.1
"""Megatron's default, which a run of this program never uses."""


@dataclass(frozen=True)
class Factor:
    """One thing changed: either `scoring`, or the configuration of the ranks; or it does not apply, for a reason."""

    name: str
    scoring: Scoring | None = None
    config: Config | None = None
    reason: str = ""
    may_explain: bool = True
    """False: no run can have what it undoes, so that a token which it brings nearer is brought so by chance."""


def as_trained(config: Config) -> Scoring:
    """As the step's loss scored."""
    return Scoring(routing_replay=config.objective.routing_replay, keep_set_replay=config.objective.keep_set_replay)


def residual(config: Config, model: ModelArchitecture, *, knows_versions: bool) -> Scoring:
    """What is left when everything that can be replayed is, under the weights that sampled each token where these are known."""
    return replace(
        as_trained(config),
        routing_replay=model.moe is not None,
        keep_set_replay=True,
        weights="sampled" if knows_versions else "step",
    )


def factors(config: Config, hf_config: Mapping[str, Any], record: StepRecord, known: frozenset[int]) -> list[Factor]:
    """In the order of the table. known: the versions whose weights the ranks have."""
    base, model = as_trained(config), ParameterTable(hf_config).architecture
    return [
        _routing_replay(base, model),
        _keep_set_replay(base, record),
        _temperature(base, record),
        _staleness(base, record, known),
        _quantisation(config),
        Factor(f"dropout {DROPOUT}", replace(base, dropout=DROPOUT), may_explain=False),
        _layout(config, hf_config),
    ]


def hypotheses(model: ModelArchitecture, record: StepRecord, left: Scoring) -> list[Factor]:
    """Known faults, each with what would undo it. left: the scoring that leaves too much."""
    temperatures = sorted(set(record.temperature.tolist()))
    shift = "the model has no experts" if model.moe is None else ""
    tempered = "" if temperatures != [1.0] else "every rollout was sampled at temperature 1"

    def tried(name: str, reason: str, **undone: Any) -> Factor:
        return Factor(name, None if reason else replace(left, **undone), reason=reason)

    sampled_at = ", ".join(f"{value:g}" for value in temperatures)
    return [
        tried("routes are shifted: tokens go to the experts of the token before them", shift, route_shift=1),
        tried("routes are shifted: tokens go to the experts of the token after them", shift, route_shift=-1),
        tried(
            f"temperature is applied on one side: sampled at {sampled_at}, and the trainer does not score at it",
            tempered,
            temperature="recorded",
        ),
        tried(
            f"temperature is applied on one side: the trainer scores at {sampled_at}, the recorded log-probs are of 1",
            tempered,
            temperature="one",
        ),
        tried("gate and up are swapped: the two programs read them in each other's place", "", gate_up_swapped=True),
    ]


def _routing_replay(base: Scoring, model: ModelArchitecture) -> Factor:
    name = f"routing replay {'off' if base.routing_replay else 'on'}"
    if model.moe is None:
        return Factor(name, reason="the model has no experts")
    return Factor(name, replace(base, routing_replay=not base.routing_replay))


def _keep_set_replay(base: Scoring, record: StepRecord) -> Factor:
    name = f"keep-set replay {'off' if base.keep_set_replay else 'on'}"
    if not record.set_size.any():
        return Factor(name, reason="no token has a keep-set: top_p is 1 and there is no top_k")
    return Factor(name, replace(base, keep_set_replay=not base.keep_set_replay))


def _temperature(base: Scoring, record: StepRecord) -> Factor:
    if (record.temperature == 1.0).all():
        return Factor("temperature 1", reason="every rollout was sampled at temperature 1")
    return Factor("temperature 1", replace(base, temperature="one"))


def _staleness(base: Scoring, record: StepRecord, known: frozenset[int]) -> Factor:
    versions = set(record.version.tolist())
    if not record.staleness.any():
        return Factor(
            "staleness 0", reason=f"all tokens were sampled by the weights that the step trains, version {record.plan.step}"
        )
    if missing := versions - known:
        listed = ", ".join(map(str, sorted(missing)))
        return Factor(
            "staleness 0",
            reason=f"the weights of version {listed} are not known: no checkpoint at or before them within --retrain steps",
        )
    return Factor("staleness 0", replace(base, weights="sampled"))


def _quantisation(config: Config) -> Factor:
    p = config.precision
    if p.training == "full" and p.rollouts == "full":
        return Factor("quantisation off", reason="neither training nor rollouts are quantised")
    off = p.training != "full"
    change = {"training": "full", "activations": "full", "rollouts": "full", "backward": "full"} if off else {"training": "qat"}
    return Factor(f"quantisation {'off' if off else 'on'} in training", config=config.with_values({"precision": change}))


def _layout(config: Config, hf_config: Mapping[str, Any]) -> Factor:
    if config.layout.world_size > 1:
        return Factor("another layout: one rank", config=config.with_values({"layout": _ONE_RANK}))
    if config.device == "cuda":
        return Factor("another layout", reason="the run has one rank, and another layout would need a second GPU")
    for name in ("tensor", "expert", "pipeline"):
        other = config.with_values({"layout": {**_ONE_RANK, "world_size": 2, name: 2}})
        if _fits(other, hf_config):
            return Factor(f"another layout: {name} 2", config=other)
    return Factor("another layout: two ranks", config=config.with_values({"layout": {**_ONE_RANK, "world_size": 2}}))


_ONE_RANK: dict[str, Any] = {**layout_values(Layout()), "sequence_parallel": None}


def _fits(config: Config, hf_config: Mapping[str, Any]) -> bool:
    layout = config.parallel_layout
    try:
        Placement(ParameterTable(hf_config, padded_vocab_size=layout.padded_vocab_size(hf_config["vocab_size"])), layout)
    except ValueError:
        return False
    return True
