"""Ways to score a step's rollouts, and what goes to the ranks and comes back from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

JOB, OUTCOME, SCORES = "job.json", "outcome.json", "scores.safetensors"
"""Files of a scratch folder: what the ranks are to do, and what they found."""


@dataclass(frozen=True)
class Scoring:
    """One way to score; `replace` changes one thing."""

    routing_replay: bool
    keep_set_replay: bool
    weights: Literal["step", "sampled"] = "step"
    """Those that the step was trained from, or of each token those that sampled it."""
    temperature: Literal["laid_out", "one", "recorded"] = "laid_out"
    """What the microbatches bring; 1; what the record of the rollout says, past the code that lays out microbatches."""
    dropout: float = 0.0
    route_shift: int = 0
    """Token i goes to the experts of row i + route_shift of its sequence; where there is none, to the live router's."""
    gate_up_swapped: bool = False


@dataclass(frozen=True)
class ScoringJob:
    """What the ranks do: get at the weights, score, and score again under the hypotheses if too much is left."""

    step: int
    start: int
    """Step from which on the recorded steps are trained again, to get at the weights of later ones."""
    checkpoint: str | None
    """The folder of the trainer's state at `start`; None: the run's own start."""
    versions: tuple[int, ...]
    """Whose weights are kept, among `start` to `step`; the step's own is one of them."""
    scorings: Mapping[str, Scoring]
    hypotheses: Mapping[str, Scoring] = field(default_factory=dict)
    residual: str | None = None
    """The scoring that leaves nothing but rounding in a healthy run."""
    rounding: float = 0.0
    """Mean |d| of the residual above which the hypotheses are tried."""
    fault: str | None = None
    """The fault to inject."""
    compare_gradients: bool = False
    save_to: str | None = None
    """Folder for the state at `step`, for ranks under another configuration."""


@dataclass(frozen=True)
class ScoringOutcome:
    """Beside the log-probs. Example: steps 20 and 21 were trained again, and came out as recorded."""

    retrained: int = 0
    """Steps that were trained again."""
    differing_metrics: tuple[str, ...] = ()
    """Names of metrics of these steps that are not as recorded, to 1e-3 relative."""
    unequal_gradients: tuple[str, ...] = ()
    """Parameters whose gradients differ between ranks that hold the same part of them."""
    num_gradients: int = 0
    """Parameters that lie on several ranks, and were compared."""
