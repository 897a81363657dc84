"""The sample ledger: every drawn prompt ends in exactly one state, so that nothing is lost or counted twice.

    draw ──▶ sampling ──finish──▶ buffered ──plan──▶ planned ──trained──▶ trained at step s
      ▲         │                    │
      │         └─────discard────────┘
      └── waiting ◀──┤ again
                     └── dropped, for a reason            (after too many faults, or where another attempt could not help)

Closed prompts cost four bytes each; only open ones (bounded by the staleness bound) have an entry.
"""

import base64
import heapq
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_rl.errors import RunError

RETRYABLE = frozenset({"stale", "interrupted", "unverified"})
"""Reasons that do not count against a prompt: it is sampled again however often they occur."""

TERMINAL = frozenset({"prompt"})
"""Reasons that another attempt cannot cure: the prompt is dropped at once."""

_OPEN = -1  # outcomes: >= 0 the step that trained it, -1 open, -2 - r dropped for reason number r


class LedgerError(RunError, ValueError):
    """A transition that the ledger does not allow: it would lose a prompt or count it twice."""


@dataclass(frozen=True)
class Draw:
    """A prompt to be sampled; `attempt` counts from 0."""

    prompt_index: int
    attempt: int


@dataclass
class _Open:
    stage: str  # 'waiting' | 'sampling' | 'buffered' | 'planned'
    attempt: int = 0
    faults: int = 0
    step: int = -1  # of the plan that holds it
    lengths: list[int] = field(default_factory=list)  # completion tokens of its finished rollouts


class LengthHistogram:
    """Completion lengths by powers of two: bin k counts the lengths in [2^k, 2^(k+1)); lengths below 1 are in bin 0."""

    def __init__(self, counts: Sequence[int] = (), total: int = 0) -> None:
        self.counts = list(counts)
        self.total = total

    def add(self, lengths: Sequence[int]) -> None:
        """Count completion lengths, in tokens."""
        for length in lengths:
            k = max(1, length).bit_length() - 1
            self.counts.extend([0] * (k + 1 - len(self.counts)))
            self.counts[k] += 1
            self.total += length

    @property
    def number(self) -> int:
        """Lengths counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean length; 0 without any."""
        return self.total / self.number if self.number else 0.0


class Ledger:
    """The state of every prompt of a run.

    Args:
        max_attempts: Attempts at one prompt that may fail by the prompt's own fault before it is dropped.
    """

    def __init__(self, *, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        self.drawn = 0
        """Prompts drawn so far; also the data cursor, the index of the next new prompt."""
        self.trained_prompts = 0
        self.dropped: Counter[str] = Counter()
        """Dropped prompts by reason."""
        self.discarded: Counter[str] = Counter()
        """Attempts without a result by reason, those of dropped prompts included."""
        self.kept_lengths = LengthHistogram()
        self.discarded_lengths = LengthHistogram()
        self._outcomes = np.empty(1024, dtype=np.int32)
        self._reasons: list[str] = []
        self._open: dict[int, _Open] = {}
        self._waiting: list[int] = []  # a heap

    @property
    def in_flight(self) -> int:
        """Prompts drawn and neither trained nor dropped: waiting, sampling, buffered or planned."""
        return len(self._open)

    def draw(self) -> Draw:
        """Return the prompt to sample next: the lowest index that waits for another attempt, else a new prompt."""
        if self._waiting:
            index = heapq.heappop(self._waiting)
            entry = self._open[index]
            entry.stage, entry.attempt = "sampling", entry.attempt + 1
            return Draw(index, entry.attempt)
        return self._draw_new()

    def _draw_new(self) -> Draw:
        index = self.drawn
        if index == len(self._outcomes):
            self._outcomes = np.concatenate([self._outcomes, np.empty_like(self._outcomes)])
        self._outcomes[index] = _OPEN
        self._open[index] = _Open("sampling")
        self.drawn += 1
        return Draw(index, 0)

    def finish(self, prompt_index: int, lengths: Sequence[int]) -> None:
        """Record that the prompt's group is complete and buffered.

        Args:
            prompt_index: The prompt.
            lengths: Completion tokens of each rollout.

        Raises:
            LedgerError: The prompt is not being sampled.
        """
        entry = self._entry(prompt_index, "finish", "sampling")
        entry.stage, entry.lengths = "buffered", list(lengths)

    def discard(self, prompt_index: int, reason: str, lengths: Sequence[int] = ()) -> bool:
        """Record that the attempt gave no result.

        Args:
            prompt_index: The prompt.
            reason: Why; RETRYABLE and TERMINAL name the special ones.
            lengths: Completion tokens of the discarded rollouts, where the group was not finished.

        Returns:
            Whether the prompt is sampled again; if not, it is dropped for this reason.

        Raises:
            LedgerError: The prompt is neither being sampled nor buffered.
        """
        entry = self._entry(prompt_index, "discard", "sampling", "buffered")
        self.discarded[reason] += 1
        self.discarded_lengths.add(entry.lengths or lengths)
        entry.lengths = []
        entry.faults += reason not in RETRYABLE
        if reason in TERMINAL or entry.faults >= self.max_attempts:
            self._close(prompt_index, -2 - self._reason_number(reason))
            self.dropped[reason] += 1
            return False
        entry.stage = "waiting"
        heapq.heappush(self._waiting, prompt_index)
        return True

    def plan(self, prompt_indices: Sequence[int], step: int) -> None:
        """Record that the prompts' groups are in the plan of `step`.

        Raises:
            LedgerError: A group is not buffered.
        """
        for index in prompt_indices:
            entry = self._entry(index, "plan", "buffered")
            entry.stage, entry.step = "planned", step

    def adopt(self, lengths: Mapping[int, Sequence[int]], step: int) -> None:
        """Take over a plan that was written after this state was saved: its prompts are planned, and those drawn since then wait.

        Args:
            lengths: Prompt index to the completion tokens of each of its rollouts.
            step: Of the plan.

        Raises:
            LedgerError: A prompt of the plan neither waits nor is buffered.
        """
        while self.drawn <= max(lengths, default=-1):
            self.discard(self._draw_new().prompt_index, "interrupted")
        for index, of_prompt in lengths.items():
            entry = self._entry(index, "adopt", "waiting", "buffered")
            if entry.stage == "waiting":
                self._waiting.remove(index)
                heapq.heapify(self._waiting)
            entry.stage, entry.step, entry.lengths = "planned", step, list(of_prompt)

    def trained(self, step: int) -> int:
        """Close the prompts of a step that the trainer has done, and return their number.

        Raises:
            LedgerError: No prompt is planned for this step.
        """
        indices = [index for index, entry in self._open.items() if entry.stage == "planned" and entry.step == step]
        if not indices:
            raise LedgerError(
                f"step {step} is reported as trained, but no planned prompt waits for it: it would be counted twice"
            )
        for index in indices:
            self.kept_lengths.add(self._open[index].lengths)
            self._close(index, step)
        self.trained_prompts += len(indices)
        return len(indices)

    def interrupt(self) -> int:
        """After a restart, send the prompts that were being sampled back to waiting, and return their number."""
        lost = [index for index, entry in self._open.items() if entry.stage == "sampling"]
        for index in lost:
            self.discard(index, "interrupted")
        return len(lost)

    def outcome(self, prompt_index: int) -> str:
        """Return 'trained at step 3', 'dropped: contract', or the stage of an open prompt.

        Raises:
            LedgerError: The prompt was never drawn.
        """
        if not 0 <= prompt_index < self.drawn:
            raise LedgerError(f"prompt {prompt_index} was never drawn; drawn are 0..{self.drawn - 1}")
        outcome = int(self._outcomes[prompt_index])
        if outcome == _OPEN:
            return self._open[prompt_index].stage
        return f"trained at step {outcome}" if outcome >= 0 else f"dropped: {self._reasons[-2 - outcome]}"

    def stages(self) -> Counter[str]:
        """Open prompts by stage."""
        return Counter(entry.stage for entry in self._open.values())

    def summary(self) -> dict[str, float]:
        """Totals for the metrics; the mean lengths show whether discarded rollouts differ from the kept ones."""
        return {
            "drawn": self.drawn,
            "trained": self.trained_prompts,
            "dropped": self.dropped.total(),
            "in_flight": self.in_flight,
            "discarded_draws": self.discarded.total(),
            "kept_length_mean": self.kept_lengths.mean,
            "discarded_length_mean": self.discarded_lengths.mean,
        }

    def check(self) -> None:
        """Check that drawn = trained + dropped + in flight, by the totals and prompt by prompt.

        Raises:
            LedgerError: The counts do not add up.
        """
        outcomes = self._outcomes[: self.drawn]
        by_prompt = (int((outcomes >= 0).sum()), int((outcomes < _OPEN).sum()), int((outcomes == _OPEN).sum()))
        by_total = (self.trained_prompts, self.dropped.total(), self.in_flight)
        if by_prompt != by_total or sum(by_total) != self.drawn:
            raise LedgerError(
                f"of {self.drawn} prompts, (trained, dropped, in flight) are {by_total} by the totals, {by_prompt} one by one"
            )

    def to_json(self) -> dict[str, Any]:
        """The complete state, as plain JSON values."""
        return {
            "drawn": self.drawn,
            "fates": base64.b64encode(zlib.compress(self._outcomes[: self.drawn].astype("<i4").tobytes())).decode(),
            "reasons": self._reasons,
            "open": {str(index): asdict(entry) for index, entry in self._open.items()},
            "trained_prompts": self.trained_prompts,
            "dropped": dict(self.dropped),
            "discarded": dict(self.discarded),
            "kept_lengths": vars(self.kept_lengths),
            "discarded_lengths": vars(self.discarded_lengths),
        }

    @classmethod
    def from_json(cls, state: dict[str, Any], *, max_attempts: int) -> "Ledger":
        """The inverse of to_json. Prompts that were being sampled still are: call interrupt() next.

        Args:
            state: What to_json returned.
            max_attempts: As in the class.

        Raises:
            LedgerError: The totals do not add up.
        """
        ledger = cls(max_attempts=max_attempts)
        ledger.drawn = state["drawn"]
        outcomes = np.frombuffer(zlib.decompress(base64.b64decode(state["fates"])), dtype="<i4")
        ledger._outcomes = np.concatenate([outcomes.astype(np.int32), np.empty(1024, dtype=np.int32)])
        ledger._reasons = list(state["reasons"])
        ledger._open = {int(index): _Open(**entry) for index, entry in state["open"].items()}
        ledger._waiting = sorted(index for index, entry in ledger._open.items() if entry.stage == "waiting")
        ledger.trained_prompts = state["trained_prompts"]
        ledger.dropped, ledger.discarded = Counter(state["dropped"]), Counter(state["discarded"])
        ledger.kept_lengths, ledger.discarded_lengths = (
            LengthHistogram(**state["kept_lengths"]),
            LengthHistogram(**state["discarded_lengths"]),
        )
        ledger.check()
        return ledger

    def _entry(self, prompt_index: int, action: str, *stages: str) -> _Open:
        entry = self._open.get(prompt_index)
        if entry is None or entry.stage not in stages:
            raise LedgerError(
                f"cannot {action} prompt {prompt_index}: it is '{self.outcome(prompt_index)}', not {' or '.join(stages)}"
            )
        return entry

    def _close(self, prompt_index: int, outcome: int) -> None:
        del self._open[prompt_index]
        self._outcomes[prompt_index] = outcome

    def _reason_number(self, reason: str) -> int:
        if reason not in self._reasons:
            self._reasons.append(reason)
        return self._reasons.index(reason)
