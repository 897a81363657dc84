"""What the orchestrator answers to the trainer: its next order, and what it does with the trainer's reports.

The messages about weights and probes are in verification.py.
"""

import asyncio
import shutil
from pathlib import Path

from megatron_rl.orchestrator.checkpoints import seal_checkpoint
from megatron_rl.orchestrator.context import RunContext
from megatron_rl.orchestrator.ranks import TrainerRanks
from megatron_rl.orchestrator.step_plans import StepPlans
from megatron_rl.orchestrator.worker_handlers import WorkerHandlers
from megatron_rl.wire.control import Ack, Order, OrderRequest, Progress, Rendezvous, RendezvousRequest, SavedReport, StepReport


class TrainerHandlers:
    """Rank 0 sends all of these messages, except that every rank asks for the rendezvous."""

    def __init__(self, context: RunContext, ranks: TrainerRanks, workers: WorkerHandlers) -> None:
        self._context, self._ranks, self._workers = context, ranks, workers
        self._plans = StepPlans(context, workers.pop_examples)

    async def on_rendezvous(self, request: RendezvousRequest) -> Rendezvous:
        """Where the ranks meet: rank 0 reports it, the others ask for it."""
        context, ranks = self._context, self._ranks
        if request.port:
            ranks.rendezvous = Rendezvous(request.host, request.port)
            await context.changes.notify()
        await context.changes.wait_until(lambda: ranks.rendezvous.port or context.failure, request.wait_s)
        return ranks.rendezvous

    async def on_order(self, request: OrderRequest) -> Order:
        """What the trainer does next.

        Train a step, update servers, save, or stop; 'wait' where nothing is due within request.wait_s.
        """
        context = self._context
        self._ranks.record_order_request()
        if request.step < context.step:
            return self._order_again(request.step)
        if request.step > context.step:
            context.fail(f"the trainer is at step {request.step}, the orchestrator at step {context.step}: restart with --resume")
        order = Order("wait")

        def decided() -> bool:
            nonlocal order
            order = self._next_order()
            return order.kind != "wait"

        await context.changes.wait_until(decided, request.wait_s)
        if order.kind == "stop":
            await context.changes.notify()  # workers wait for groups that will not come
        return order

    async def on_step(self, report: StepReport) -> Ack:
        """A step is trained."""
        context = self._context
        context.watchdog.record_progress()
        if report.step < context.step:  # sent again, since our answer was lost on the way; or done again after a restart
            return Ack()
        self._ranks.finish_step()
        context.state.ledger.trained(report.step)
        self._plans.finish_step()
        context.step = report.step + 1
        context.observe.step(
            report.step,
            report.metrics,
            rollout_tokens_per_s=self._workers.pop_tokens_per_s(),
            ledger=context.state.ledger.summary(),
        )
        await context.changes.notify()
        return Ack()

    async def on_saved(self, report: SavedReport) -> Ack:
        """The trainer's part is in a staging folder.

        With the orchestrator's part the checkpoint is complete, and the folder gets its name.
        """
        context, checkpoint = self._context, self._context.config.checkpoint
        staging = Path(report.folder)
        if context.saved_step == report.step and not staging.exists():  # sent again, since our answer was lost on the way
            return Ack()
        final = context.folder.checkpoint(report.step)
        seal_checkpoint(staging, final, report.step, context.state)
        context.saved_step = report.step
        for _, old in context.folder.complete_checkpoints()[: -checkpoint.keep]:
            shutil.rmtree(old)
        if checkpoint.spool_steps is not None:
            oldest, _ = context.folder.complete_checkpoints()[0]
            await asyncio.to_thread(context.spool.forget, oldest - checkpoint.spool_steps)
        context.observe.event(f"checkpoint: {final}")
        await context.changes.notify()
        return Ack()

    async def on_progress(self, report: Progress) -> Ack:
        """How far the supervised start has come."""
        self._context.observe.progress(report)
        return Ack(stop=self._context.stop_requested)

    def _next_order(self) -> Order:
        context = self._context
        if context.failure:
            return Order("stop")
        done = context.step >= context.config.run.steps
        if self._should_save(done):
            return Order("save")
        if done or context.stop_requested:
            context.stop_requested = True
            return Order("stop")
        if stale := self._to_sync():
            context.syncing = stale
            return Order("sync", servers=stale)
        plan = self._plans.current()
        return Order("train", plan_file=plan) if plan else Order("wait")

    def _should_save(self, done: bool) -> bool:
        context = self._context
        due = context.step and context.step % context.config.checkpoint.every == 0
        return bool(due or done or context.stop_requested) and context.saved_step != context.step

    def _to_sync(self) -> tuple[str, ...]:
        """Servers that need the current weights.

        At the start of a run all servers are waited for, so that one update serves them all.
        """
        fleet = self._context.fleet
        never_synced = all(s.version is None for s in fleet.servers)
        if never_synced and any(s.state == "starting" for s in fleet.servers):
            return ()
        return tuple(s.url for s in fleet.to_sync(self._context.step))

    def _order_again(self, step: int) -> Order:
        """For a trainer that was restarted: a step that was done before.

        Nothing is saved before the trainer has caught up, since the state here is that of a later step.
        """
        plan = None if self._context.stop_requested else self._plans.again(step)
        return Order("train", plan_file=plan) if plan else Order("stop")
