"""The training loop. Rank 0 asks the orchestrator for orders and broadcasts them; every rank executes them on its part.

begin ──▶ order ──▶ sync   bring servers to this version, then probe them
            │──▶ train  step plan ──▶ this rank's microbatches ──▶ update(s) ──▶ report
            │──▶ save   a checkpoint, completed by the orchestrator
            └──▶ stop   export, exit
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_rl.batching import Microbatch, Spool, microbatches_for, split_step
from megatron_rl.config import Config, RunFolder
from megatron_rl.engine import build_engine, start_process
from megatron_rl.engine.learning_rate import learning_rate
from megatron_rl.errors import RunError
from megatron_rl.metrics import Metric, Spans
from megatron_rl.objective import Denominators, PolicyLoss
from megatron_rl.records import StepPlan, write_scores
from megatron_rl.trainer.faults import fail_together
from megatron_rl.trainer.fingerprint import Fingerprint, checksums
from megatron_rl.trainer.model_folder import assembly_options, open_model
from megatron_rl.trainer.probe import Prober
from megatron_rl.trainer.publisher import Publisher
from megatron_rl.trainer.ranks import broadcast_object, gather, gather_object, own_rank, rendezvous
from megatron_rl.trainer.saving import check_loaded, load_checkpoint, save_checkpoint, write_policy
from megatron_rl.trainer.scored import LogProbRecorder, step_ratio_quantiles, step_scores
from megatron_rl.trainer.set_sizes import set_size_counts, set_size_quantiles
from megatron_rl.trainer.steering import Steering, steering_from_environment
from megatron_rl.trainer.supervised import SupervisedStart
from megatron_rl.trainer.update import Update, metrics_of_step, step_times
from megatron_rl.wire.control import Order, SavedReport, StepReport

logger = logging.getLogger(__name__)

LogProbs = Sequence[np.ndarray]
"""f32 [N] of each microbatch."""


def train(folder: RunFolder, resume: bool) -> None:
    """Run one trainer rank from its start to the order to stop.

    Args:
        folder: Of the run.
        resume: Whether to continue from the latest checkpoint.

    Raises:
        RendezvousTimeoutError: Rank 0 has not published the address of the ranks' store in time.
        RankFaultError: This or another rank has failed.
    """
    config, steering = folder.config(), steering_from_environment()
    store = rendezvous(steering, config.trainer.collective_timeout_s)
    with fail_together(store, own_rank(), config.layout.world_size):
        trainer = Trainer(folder, config, store, steering if own_rank() == 0 else None)
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


class BatchError(RunError):
    """The batch of a step cannot be read on some rank; raised on all of them."""


class Trainer:
    """One rank. `step` is the number of completed steps, which is the version of the weights."""

    def __init__(self, folder: RunFolder, config: Config, store: dist.Store, steering: Steering | None) -> None:
        """Build the engine; a collective.

        Args:
            folder: Of the run.
            config: May differ from the folder's, as in a rerun at another layout.
            store: The ranks' store.
            steering: Rank 0's client of the orchestrator; None on the other ranks, and where the caller chooses what is trained.
        """
        self.folder, self.config, self.steering = folder, config, steering
        self.groups = start_process(self.config, own_rank(), store=store)
        model = open_model(folder.weights)
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
        self._to_report: dict[str, float] = {}
        """Measured since the last step's report: the update of the servers and the probe belong to the step that follows them."""

    def begin(self, checkpoint: Path | None, *, recorded_start: bool = False) -> None:
        """Take the weights of a checkpoint, of the supervised start, or of the model as it is.

        Args:
            checkpoint: None begins at step 0.
            recorded_start: Take the supervised start that the run's folder holds, whatever settings made it.

        Raises:
            EngineCheckpointError: The checkpoint is not what was saved.
        """
        if self.loss.needs_reference or checkpoint is None:
            start = SupervisedStart(self)
            start.load() if recorded_start else start.run_or_load()
        if self.loss.needs_reference:
            self.engine.keep_reference()
        if checkpoint is not None:
            self.step = load_checkpoint(self.engine, checkpoint)
            if self.config.fingerprints:
                check_loaded(self.engine, checkpoint, self.folder.fingerprints, self.step, self.config.layout)
        logger.info("rank %d of %d begins at step %d", self.groups.rank, self.groups.layout.world_size, self.step)

    def next_order(self) -> Order:
        """The order that rank 0 gets, on all ranks; a collective.

        A 'wait' is broadcast too, so that no rank waits in a collective for longer than one request.
        """
        while True:
            order = broadcast_object(self.steering.next_order(self.step) if self.steering else None)
            if order.kind != "wait":
                return order

    def publish(self, order: Order) -> None:
        """Bring the order's servers to this version of the weights, and score the probe rollouts that they return."""
        self._to_report |= self.publisher.publish(order.servers, self.step)
        self._to_report |= self.prober.score(self.step)

    def step_once(self, order: Order) -> None:
        """Train the order's step plan and report it."""
        metrics = self.train_plan(order.plan_file)
        if self.steering:
            if self.fingerprint:  # before the report: a step that counts as done has one
                self.fingerprint.write(self.folder.fingerprints)
            if self.scores:
                write_scores(self.folder.scores_file(self.step - 1), self.scores)
            self.steering.report(StepReport(self.step - 1, {**self._to_report, **metrics}))
        self._to_report = {}

    def train_plan(self, plan_file: str) -> dict[str, float]:
        """Train one batch in trainer.updates_per_step updates; a collective.

        Args:
            plan_file: Of the step plan, relative to the run's folder.

        Returns:
            The step's metrics.

        Raises:
            BatchError: On all ranks, where one of them cannot read its part.
        """
        spans = Spans()
        with spans("step"):
            with spans("assemble"):
                plan = self._read(plan_file)
            updates = [self._assemble(part, spans) for part in split_step(plan, self.config.trainer.updates_per_step)]
            with spans("score"):
                old, reference = self._old_logprobs(updates), self._reference_logprobs(updates)
            metrics = metrics_of_step(self._train(updates, old, reference))
            with spans("measure"):
                metrics |= self._measure(updates)
            metrics["own_s"] += spans["measure"]
            if self.config.fingerprints:
                self._take_fingerprint(spans)
                metrics["fingerprint_s"] = spans["fingerprint"]
        metrics |= step_times(spans, metrics, num_tokens=sum(entry.num_tokens for entry in plan.entries))
        values = self.step, metrics["loss"], metrics["grad_norm"], spans["step"]
        logger.info("step %d: loss %.6g, grad norm %.4g, %.2f s", *values)
        self.step += 1
        return metrics

    def save(self) -> None:
        """Write the trainer's part of a checkpoint to a staging folder; the orchestrator adds its own part and renames it."""
        staging = self.folder.checkpoints / f".step_{self.step:06d}.part"
        save_checkpoint(self.engine, staging, self.step)
        if self.steering:
            self.steering.report(SavedReport(self.step, str(staging)))

    def finish(self) -> None:
        """Export the policy after the last step, and close the connections to the servers."""
        if self.config.checkpoint.export and self.step >= self.config.run.steps:
            write_policy(self.engine, self.folder.export, self.folder)
        self.publisher.close()

    def _read(self, plan_file: str) -> StepPlan:
        plan = self.spool.read_plan(plan_file)
        assert plan.step == self.step, f"{plan_file} is the plan of step {plan.step}, not of step {self.step}"
        return plan

    def _assemble(self, part: StepPlan, spans: Spans) -> Update:
        """This rank's microbatches. A rank that cannot read its part notifies the others, which would wait in a collective."""
        microbatches: list[Microbatch] = []
        fault = ""
        with spans("assemble"):
            try:
                microbatches = microbatches_for(part, self.spool, self.groups.layout, self.groups.coords, self.options)
            except (ValueError, OSError) as error:  # a contract, a payload, a sequence that does not fit
                fault = f"rank {self.groups.rank}: {error}"
        if faults := [text for text in gather(fault) if text]:
            raise BatchError(
                f"the batch of step {part.step} cannot be read: {'; '.join(faults)}; --resume samples it again where a file is "
                "incomplete"
            )
        return Update(part, microbatches, LogProbRecorder(self.loss))

    def _old_logprobs(self, updates: Sequence[Update]) -> list[LogProbs | None]:
        if not self.loss.needs_old_forward(self.config.trainer.updates_per_step):
            return [None] * len(updates)
        return [[scores.log_probs for scores in self.engine.score(update.microbatches)] for update in updates]

    def _reference_logprobs(self, updates: Sequence[Update]) -> list[LogProbs | None]:
        if not self.loss.needs_reference:
            return [None] * len(updates)
        return [[scores.log_probs for scores in self.engine.score_reference(update.microbatches)] for update in updates]

    def _train(
        self, updates: Sequence[Update], old: Sequence[LogProbs | None], reference: Sequence[LogProbs | None]
    ) -> list[dict[str, Metric]]:
        rate = learning_rate(self.config.optimizer, self.step, self.config.run.steps)
        return [
            self.engine.train_step(
                update.microbatches,
                update.loss,
                Denominators.of(update.plan),
                step=self.step,
                learning_rate=rate,
                old_logprobs=of_old,
                reference_logprobs=of_reference,
            )
            for update, of_old, of_reference in zip(updates, old, reference, strict=True)
        ]

    def _measure(self, updates: Sequence[Update]) -> dict[str, float]:
        """Quantiles over the step's loss tokens, and the scores of a few rollouts; a collective."""
        parts = [(update.plan, update.microbatches, update.loss) for update in updates]
        self.scores = step_scores(parts, self.config.metrics.examples_per_step, self._is_loss_reporting_rank)
        ratios = step_ratio_quantiles([update.loss for update in updates], self._is_loss_reporting_rank, self.groups.device)
        # All ranks of a data-parallel replica have the same microbatches: one reports.
        coords = self.groups.coords
        own = [m for update in updates for m in update.microbatches] if coords.tp == coords.cp == coords.pp == 0 else []
        return ratios | set_size_quantiles(gather_object(set_size_counts(own)) or ())

    @property
    def _is_loss_reporting_rank(self) -> bool:
        """One of the ranks of a replica's last stage, which all compute the same loss."""
        return self.groups.is_last_stage and self.groups.coords.tp == self.groups.coords.cp == 0

    def _take_fingerprint(self, spans: Spans) -> None:
        with spans("fingerprint"):  # without the wait for the other ranks
            own = checksums(self.engine.state())
        if (of_all := gather_object(own)) is not None:
            self.fingerprint = Fingerprint(self.step, self.config.layout.model_dump(), tuple(of_all))
