"""What the orchestrator knows of rollouts: lengths, rewards, versions and where the payload is, but no token ids."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RolloutSummary:
    """One rollout in a payload file.

    Example: RolloutSummary(uid='g000012.3', file='rollouts/g000012.safetensors', index=3, num_prompt_tokens=4,
    num_completion_tokens=2, num_loss_tokens=2, num_singletons=1, num_keep_ids=3, num_with_keep_set=2, num_with_routes=5,
    reward=1.0, finish_reason='stop', min_version=12, max_version=12).
    """

    uid: str
    """Id of the rollout: its group's uid, a dot, its number in the group."""
    file: str
    """Path of the payload file, relative to the spool; '' for a rollout that is not kept."""
    index: int
    """Record number in the file, from 0."""
    num_prompt_tokens: int
    num_completion_tokens: int
    """Tool output included."""
    num_loss_tokens: int
    """Completion tokens that the policy sampled."""
    num_singletons: int
    """Loss tokens whose keep-set has one id."""
    num_keep_ids: int
    """Ids of all keep-sets together."""
    num_with_keep_set: int
    """Loss tokens that came with a keep-set."""
    num_with_routes: int
    """Tokens whose experts were recorded; the last token of a sequence is never routed and not counted."""
    reward: float
    finish_reason: str
    """'stop' | 'length'."""
    min_version: int
    """Version of the weights that sampled the oldest loss token."""
    max_version: int
    """Version of the weights that sampled the newest loss token."""


@dataclass(frozen=True)
class GroupTask:
    """A prompt to be sampled `num_samples` times on one server.

    Example: GroupTask(uid='g000012', prompt_index=12, attempt=0, num_samples=8, server='http://127.0.0.1:8000').
    """

    uid: str
    prompt_index: int
    """Number of the prompt in the task's order, from 0."""
    attempt: int
    """Counts how often this prompt was sampled, from 0."""
    num_samples: int
    server: str
    """http://127.0.0.1:8000."""
    probe: bool = False
    """A probe is sampled like any group, kept out of training, and scored by the trainer at equal weights."""


@dataclass(frozen=True)
class GroupResult:
    """How a group ended: the summaries of its rollouts, or why it failed."""

    uid: str
    prompt_index: int
    attempt: int
    server: str
    rollouts: tuple[RolloutSummary, ...] = ()
    failure: str | None = None
    """'contract', 'reward', 'server' or 'prompt'; None where the group succeeded."""
    message: str = ""
    """Message of the failure."""
    seconds: float = 0.0
    """From the task to the result."""
    payload_bytes: int = 0
    examples: tuple[dict[str, Any], ...] = ()
    """A few readable rollouts: {'uid': ..., 'prompt': '2*3=', 'completion': '6', 'reward': 1.0, 'finish_reason': 'stop'}."""


@dataclass(frozen=True)
class PlanEntry:
    """One rollout of a step with its advantage.

    Example: PlanEntry(uid='g000012.3', prompt_index=12, file='rollouts/g000012.safetensors', index=3, num_tokens=6,
    num_loss_tokens=2, advantage=0.5).
    """

    uid: str
    prompt_index: int
    file: str
    """Path of the payload file, relative to the spool."""
    index: int
    """Record number in the file, from 0."""
    num_tokens: int
    """Prompt and completion."""
    num_loss_tokens: int
    advantage: float
    """0 in a probe, which is not trained on."""


@dataclass(frozen=True)
class StepPlan:
    """What one trainer step consumes. It says nothing of the parallelism layout, so that any layout can run it, now or again."""

    step: int
    """The step that consumes it; also the version of the weights that it is trained from."""
    entries: tuple[PlanEntry, ...]
    summary: dict[str, float] = field(default_factory=dict)
    """What the orchestrator measured of the batch, by the names of the catalogue: {'reward_mean': 0.25, 'num_rollouts': 64.0,
    ...}."""

    @property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens of all entries."""
        return sum(e.num_loss_tokens for e in self.entries)

    @property
    def num_sequences(self) -> int:
        """Rollouts that have a loss token."""
        return sum(e.num_loss_tokens > 0 for e in self.entries)
