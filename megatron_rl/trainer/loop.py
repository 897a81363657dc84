"""The training loop. Rank 0 asks for orders and shares them; every rank does the same with its share of model and batch.

begin ──▶ order ──▶ sync   bring servers to this version, then probe them
            │──▶ train  plan ──▶ this rank's microbatches ──▶ update(s) ──▶ report
            │──▶ save   a checkpoint, made whole by the orchestrator
            └──▶ stop   export, leave
"""

import logging
import os
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_rl.batching import Microbatch, Spool, microbatches_for, split_step
from megatron_rl.config import Config, RunFolder
from megatron_rl.engine import build_engine, start_process
from megatron_rl.engine.checkpoint import CheckpointError
from megatron_rl.engine.learning_rate import learning_rate
from megatron_rl.metrics import Metric, merge, to_floats
from megatron_rl.objective import Denominators, PolicyLoss
from megatron_rl.records import StepPlan, write_scores
from megatron_rl.trainer.faults import fail_together
from megatron_rl.trainer.fingerprint import Fingerprint, checksums
from megatron_rl.trainer.model_folder import assembly_options, open_model
from megatron_rl.trainer.probe import Prober
from megatron_rl.trainer.publisher import Publisher
from megatron_rl.trainer.ranks import broadcast_object, gather, gather_object, rendezvous, the_rank
from megatron_rl.trainer.saving import load_checkpoint, save_checkpoint, write_policy
from megatron_rl.trainer.scored import KeepsLogProbs, completion_scores, shown_entries, step_ratio_quantiles
from megatron_rl.trainer.set_sizes import set_size_counts, set_size_quantiles
from megatron_rl.trainer.steering import Steering, steering_from_environment
from megatron_rl.trainer.supervised import SupervisedStart
from megatron_rl.wire.control import Order, SavedReport, StepReport

logger = logging.getLogger(__name__)


def train(folder: RunFolder, resume: bool) -> None:
    """The whole life of a trainer rank."""
    config, steering = folder.config(), steering_from_environment()
    store = rendezvous(steering, config.trainer.collective_timeout_s)
    with fail_together(store, the_rank(), config.layout.world_size):
        trainer = Trainer(folder, config, store, steering if the_rank() == 0 else None)
        latest = folder.latest_checkpoint() if resume else None
        trainer.begin(latest[1] if latest else None)
        while (order := trainer.next_order()).kind != "stop":
            if order.kind == "sync":
                trainer.publish(order)
            elif order.kind == "train":
                trainer.step_once(order)
            elif order.kind == "save":
                trainer.save()
        trainer.finish()


class BatchError(RuntimeError):
    """The batch of a step cannot be read on some rank; raised on all of them."""


class Trainer:
    """One rank. `step` is the number of steps done, which is the version of the weights.

    store: where the ranks find one another. steering: rank 0's way to the orchestrator; None on the other ranks, and where a caller says what is trained.
    """

    def __init__(self, folder: RunFolder, config: Config, store: dist.Store, steering: Steering | None):
        self.folder, self.config, self.steering = folder, config, steering
        self.groups = start_process(self.config, the_rank(), store=store, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
        model = open_model(folder.model)
        self.engine = build_engine(self.config, self.groups, model.config, model)
        self.spool = Spool(folder.path)
        self.options = assembly_options(self.config, self.engine)
        self.loss = PolicyLoss(self.config.objective)
        self.publisher = Publisher(self.config, self.engine, self.steering)
        self.prober = Prober(self)
        self.step = 0
        self.fingerprint: Fingerprint | None = None
        """Of the last step, where the config asks for it; on rank 0."""
        self.scores: dict[str, np.ndarray] = {}
        """Of a few rollouts of the last step: uid to the log-probs [C] that its loss was computed from; on rank 0."""
        self._assemble_s = 0.0
        self._to_report: dict[str, float] = {}
        """Measured since the last step's report: the update of the servers and the probe belong to the step that follows them."""

    def begin(self, checkpoint: Path | None, *, recorded_start: bool = False) -> None:
        """From a checkpoint, or from the supervised start, or from the model as it is.

        recorded_start: take the start that the run's folder holds, whatever settings made it.
        """
        if self.loss.needs_reference or checkpoint is None:
            start = SupervisedStart(self)
            start.load() if recorded_start else start.run_or_load()
        if self.loss.needs_reference:
            self.engine.keep_reference()
        if checkpoint is not None:
            self.step = load_checkpoint(self.engine, checkpoint)
            self._check_loaded(checkpoint)
        logger.info("rank %d of %d begins at step %d", self.groups.rank, self.groups.layout.world_size, self.step)

    def next_order(self) -> Order:
        """Rank 0 asks; all do the same. A wait is shared too, so that no rank waits in a collective for longer than one question."""
        while (order := broadcast_object(self.steering and self.steering.next_order(self.step))).kind == "wait":
            pass
        return order

    def publish(self, order: Order) -> None:
        self._to_report |= self.publisher.publish(order.servers, self.step)
        self._to_report |= self.prober.score(self.step)

    def step_once(self, order: Order) -> None:
        metrics = self.train_plan(order.plan_file)
        if self.steering:
            if self.fingerprint:  # before the report: a step that counts as done has one
                self.fingerprint.write(self.folder.fingerprints)
            if self.scores:
                write_scores(self.folder.scores_file(self.step - 1), self.scores)
            self.steering.report(StepReport(self.step - 1, {**self._to_report, **metrics}))
        self._to_report = {}

    def train_plan(self, plan_file: str) -> dict[str, float]:
        """One batch, in trainer.updates_per_step updates; returns the step's metrics."""
        began = time.perf_counter()
        plan = self.spool.read_plan(plan_file)
        assert isinstance(plan, StepPlan) and plan.step == self.step, f"{plan_file} is no plan of step {self.step}"
        parts = split_step(plan, self.config.trainer.updates_per_step)
        self._assemble_s = time.perf_counter() - began
        batches = [self._assemble(part) for part in parts]
        assembled = time.perf_counter()
        old = [self._old_logprobs(batch) for batch in batches]
        reference = [self._reference_logprobs(batch) for batch in batches]
        scored = time.perf_counter()
        rate = learning_rate(self.config.optimizer, self.step, self.config.run.steps)
        keeping = [KeepsLogProbs(self.loss) for _ in parts]
        updates = [
            self.engine.train_step(
                batch,
                loss,
                Denominators.of(part),
                step=self.step,
                learning_rate=rate,
                old_logprobs=of_old,
                reference_logprobs=of_reference,
            )
            for part, batch, loss, of_old, of_reference in zip(parts, batches, keeping, old, reference, strict=True)
        ]
        metrics = _over_updates(updates)
        updated = time.perf_counter()
        self.scores = self._shown_scores(parts, batches, keeping)
        metrics |= step_ratio_quantiles(keeping, self._is_loss_reporting_rank, self.groups.device) | self._set_sizes(batches)
        metrics["own_s"] += time.perf_counter() - updated
        if self.config.fingerprints:
            metrics["fingerprint_s"] = self._take_fingerprint()
        metrics |= self._times(plan, metrics, step_s=time.perf_counter() - began, score_s=scored - assembled)
        self.step += 1
        return metrics

    def save(self) -> None:
        """The trainer's part of a checkpoint, under another name until the orchestrator has put its own part beside it."""
        aside = self.folder.checkpoints / f".step_{self.step:06d}.part"
        save_checkpoint(self.engine, aside, self.step)
        if self.steering:
            self.steering.report(SavedReport(self.step, str(aside)))

    def finish(self) -> None:
        if self.config.checkpoint.export and self.step >= self.config.run.steps:
            write_policy(self.engine, self.folder.export, self.folder.model)
        self.publisher.close()

    def _assemble(self, part: StepPlan) -> list[Microbatch]:
        """This rank's microbatches. A rank that cannot read its share tells the others, which would wait for it in a collective."""
        batch, fault, began = [], "", time.perf_counter()
        try:
            batch = microbatches_for(part, self.spool, self.groups.layout, self.groups.coords, self.options)
        except (ValueError, OSError) as error:  # a contract, a payload, a sequence that does not fit
            fault = f"rank {self.groups.rank}: {error}"
        self._assemble_s += time.perf_counter() - began
        if faults := [text for text in gather(fault) if text]:
            raise BatchError(
                f"the batch of step {part.step} cannot be read: {'; '.join(faults)}; --resume draws it anew where a file is not whole"
            )
        return batch

    def _check_loaded(self, checkpoint: Path) -> None:
        """Against the checksums of the step that it was saved after, where they were recorded at this layout: a byte that a disk has
        changed shows in nothing else. A collective; raises CheckpointError on the first rank, which ends all."""
        recorded = Fingerprint.read(self.folder.fingerprints, self.step - 1) if self.config.fingerprints else None
        own = gather_object(checksums(self.engine.state())) if broadcast_object(recorded is not None) else None
        if own is None or recorded.layout != self.config.layout.model_dump():
            return
        if found := recorded.first_difference(Fingerprint(self.step - 1, recorded.layout, tuple(own))):
            raise CheckpointError(
                f"{checkpoint}: {found.name} of rank {found.rank}, and {found.num_different - 1} more tensors, are not what was saved; "
                "remove the folder, and --resume goes on from the checkpoint before it"
            )

    def _old_logprobs(self, batch: list[Microbatch]) -> list[np.ndarray] | None:
        if not self.loss.needs_old_forward(self.config.trainer.updates_per_step):
            return None
        return [scores.log_probs for scores in self.engine.score(batch)]

    def _reference_logprobs(self, batch: list[Microbatch]) -> list[np.ndarray] | None:
        return [scores.log_probs for scores in self.engine.score_reference(batch)] if self.loss.needs_reference else None

    def _shown_scores(
        self, parts: list[StepPlan], batches: list[list[Microbatch]], kept: list[KeepsLogProbs]
    ) -> dict[str, np.ndarray]:
        """What the loss saw of the step's shown rollouts, on rank 0."""
        own: dict[str, np.ndarray] = {}
        count = self.config.metrics.examples_per_step
        if not count:
            return own
        if self._is_loss_reporting_rank:
            for part, batch, loss in zip(parts, batches, kept, strict=True):
                own |= completion_scores(batch, loss.log_probs, part.entries, shown_entries(part, count))
        return {uid: scores for of_rank in gather_object(own) or () for uid, scores in of_rank.items()}

    def _set_sizes(self, batches: list[list[Microbatch]]) -> dict[str, float]:
        """Quantiles over the step's loss tokens; a collective. All ranks of a replica know its microbatches: one speaks."""
        coords = self.groups.coords
        own = [m for batch in batches for m in batch] if coords.tp == coords.cp == coords.pp == 0 else []
        return set_size_quantiles(gather_object(set_size_counts(own)) or ())

    @property
    def _is_loss_reporting_rank(self) -> bool:
        """Of the last stage's ranks of a replica, all of which see the same, one speaks."""
        return self.groups.is_last_stage and self.groups.coords.tp == self.groups.coords.cp == 0

    def _take_fingerprint(self) -> float:
        """Returns the seconds that this rank's checksums took."""
        began = time.perf_counter()
        own = checksums(self.engine.state())
        took_s = time.perf_counter() - began
        if (of_all := gather_object(own)) is not None:
            self.fingerprint = Fingerprint(self.step, self.config.layout.model_dump(), tuple(of_all))
        return took_s

    def _times(self, plan: StepPlan, metrics: dict[str, float], *, step_s: float, score_s: float) -> dict[str, float]:
        """overhead_share: of the work of a step (without waiting, without the update of the servers), what is neither Megatron's passes
        nor the optimizer: reading, checking, packing, replay, loss, metrics, fingerprints."""
        own_s = self._assemble_s + metrics["own_s"] + metrics.get("fingerprint_s", 0.0)
        work_s = metrics["forward_backward_s"] + metrics["optimizer_s"] + score_s
        tokens = sum(entry.num_tokens for entry in plan.entries)
        logger.info(
            "step %d: loss %.6g, grad norm %.4g, %.2f s", self.step, metrics.get("loss", 0.0), metrics["grad_norm"], step_s
        )
        return {
            "step_s": step_s, "assemble_s": self._assemble_s, "score_s": score_s, "overhead_share": own_s / (own_s + work_s),
            "trainer_tokens_per_s": tokens / step_s,
        }  # fmt: skip


def _over_updates(updates: list[dict[str, Metric]]) -> dict[str, float]:
    """Of the updates of a step: seconds add up, the loss is their mean, everything else is reduced as it says."""
    values = to_floats(merge(updates))
    for name in ("forward_backward_s", "optimizer_s", "own_s"):
        values[name] = sum(update[name].value for update in updates)
    values["loss"] = sum(update["loss"].value for update in updates) / len(updates)
    return values
