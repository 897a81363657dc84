"""The supervised start: steps on reference solutions, so that RL begins with a policy that sometimes succeeds."""

import hashlib
import json
import logging

from megatron_rl.batching import SupervisedExample, SupervisedPlan, supervised_microbatches
from megatron_rl.config import Config
from megatron_rl.conversion import HfCheckpoint
from megatron_rl.metrics import to_floats
from megatron_rl.objective import Denominators, SupervisedLoss
from megatron_rl.tasks import TextEncoder, load_task
from megatron_rl.trainer.rank import TrainerRank
from megatron_rl.trainer.ranks import broadcast_object
from megatron_rl.trainer.saving import write_policy
from megatron_rl.wire.control import Progress

logger = logging.getLogger(__name__)

REPORT_EVERY = 10
FINAL_RATE = 0.1
"""The learning rate falls linearly to this share of its peak."""


class SupervisedStart:
    """Trains the supervised start, or reads it where the run's folder holds it.

    Args:
        rank: This trainer rank, whose engine is trained.
    """

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank
        self._section = rank.config.supervised
        self._cache = rank.folder.supervised
        self._seal = rank.folder.supervised_seal  # written last: the cache is complete

    def run_or_load(self) -> None:
        """Train, or take what the same settings gave before; a collective.

        Both ways the policy is then read from the cache, so that both give the same bits.
        """
        if not self._section.steps:
            return
        if not broadcast_object(self._is_cached()):
            self._train()
            self._write_cache()
        self.load()

    def load(self) -> None:
        """Load the supervised start that the run's folder holds, if the config asks for one; a collective."""
        if self._section.steps:
            self._rank.engine.load_weights(HfCheckpoint.open(self._cache))

    def _train(self) -> None:
        t, loss = self._rank, SupervisedLoss()
        task = load_task(t.config.task, t.config.run.seed + 1)  # another seed than RL, which begins with unseen prompts
        encoder = TextEncoder(t.folder.model, t.config.task)
        for step in range(self._section.steps):
            numbers = range(step * self._section.batch_size, (step + 1) * self._section.batch_size)
            examples = tuple(
                SupervisedExample(encoder.prompt(task.prompt(n)), encoder.solution(task.solution(n))) for n in numbers
            )
            plan = SupervisedPlan(step, examples)
            microbatches = supervised_microbatches(plan, t.groups.layout, t.groups.coords, t.options)
            measured = t.engine.train_step(microbatches, loss, Denominators.of(plan), step=step, learning_rate=self._rate(step))
            if self._should_stop(step, to_floats(measured)):
                raise SystemExit(0)

    def _rate(self, step: int) -> float:
        s = self._section
        if step < s.warmup_steps:
            return s.learning_rate * (step + 1) / s.warmup_steps
        progress = (step - s.warmup_steps) / max(1, s.steps - s.warmup_steps)
        return s.learning_rate * (1.0 - (1.0 - FINAL_RATE) * progress)

    def _should_stop(self, step: int, metrics: dict[str, float]) -> bool:
        """Report the progress; nothing of an incomplete start is kept, so a stop is possible at any of these steps."""
        done = step + 1
        if done % REPORT_EVERY and done != self._section.steps:
            return False
        logger.info("supervised step %d: loss %.4f", step, metrics["loss"])
        answer = self._rank.steering and self._rank.steering.report(Progress("supervised", done, self._section.steps, metrics))
        return broadcast_object(bool(answer and answer.stop))

    def _write_cache(self) -> None:
        """The policy as a Hugging Face folder, then the settings that made it: a folder without its seal is incomplete."""
        t = self._rank
        write_policy(t.engine, self._cache, t.folder)
        if t.groups.rank == 0:
            self._seal.write_text(json.dumps({"made_by": _digest(t.config)}))

    def _is_cached(self) -> bool:
        """Whether the cache is complete and of these settings; rank 0 alone checks it."""
        if self._rank.groups.rank != 0 or not self._seal.exists():
            return False
        return json.loads(self._seal.read_text())["made_by"] == _digest(self._rank.config)


def _digest(config: Config) -> str:
    """A digest of all settings that the supervised start depends on."""
    parts = [
        config.model,
        config.task,
        config.supervised,
        config.run.seed,
        *config.optimizer.update_settings(),
    ]
    text = json.dumps([p.model_dump(mode="json") if hasattr(p, "model_dump") else p for p in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
