"""What the orchestrator steers by: no token ids, only lengths, rewards, versions and where the payload lies."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RolloutSummary:
    """One rollout in a payload file: record `index` of `file` (relative to the spool)."""

    uid: str
    file: str
    index: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_loss_tokens: int
    num_singletons: int
    num_keep_ids: int
    num_with_keep_set: int  # loss tokens that came with a keep-set
    num_with_routes: int  # tokens whose experts were recorded (the last token of a sequence is never routed and not counted)
    reward: float
    finish_reason: str
    min_version: int
    max_version: int


@dataclass(frozen=True)
class GroupTask:
    """A prompt to be sampled `num_samples` times on one server. `attempt` counts the draws of this prompt, from 0."""

    uid: str
    prompt_index: int
    attempt: int
    num_samples: int
    server: str  # http://127.0.0.1:8000
    probe: bool = False
    """A probe is sampled like any group, kept out of training, and scored by the trainer at equal weights."""


@dataclass(frozen=True)
class GroupResult:
    """How a group ended: its summaries, or why it failed ('contract', 'reward', 'server', 'prompt')."""

    uid: str
    prompt_index: int
    attempt: int
    server: str
    rollouts: tuple[RolloutSummary, ...] = ()
    failure: str | None = None
    message: str = ""
    seconds: float = 0.0
    payload_bytes: int = 0
    examples: tuple[dict, ...] = ()
    """A few readable rollouts: prompt, completion, reward."""


@dataclass(frozen=True)
class PlanEntry:
    """One rollout of a step with its advantage."""

    uid: str
    prompt_index: int
    file: str
    index: int
    num_tokens: int
    num_loss_tokens: int
    advantage: float


@dataclass(frozen=True)
class StepPlan:
    """What one trainer step consumes; says nothing of the layout, so that any layout can run it, now or again."""

    step: int
    """The step that consumes it; also the policy version that it is trained from."""
    entries: tuple[PlanEntry, ...]
    summary: dict[str, float] = field(default_factory=dict)
    """What the orchestrator measured of the batch: reward, staleness, coverage, lengths."""

    @property
    def num_loss_tokens(self) -> int:
        return sum(e.num_loss_tokens for e in self.entries)

    @property
    def num_sequences(self) -> int:
        """Rollouts that have a loss token."""
        return sum(e.num_loss_tokens > 0 for e in self.entries)
