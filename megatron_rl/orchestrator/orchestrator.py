"""The asynchronous loop of a run: one event loop, no torch, only summaries.

      ┌───────────── /work ◀── admission: staleness bound (state) ◀──────────────┐
      ▼                                                                          │ version v + 1
   workers ── /groups ──▶ ledger, buffer ── a step's groups ──▶ plan in the spool │
      ▲                                                              │ /order: train
      │ groups go only to servers that are ready                     ▼           │
    fleet ── joined: /order: sync ─────────────────────────────▶ trainer ── /step, /weights, /probed
      ▲                                                              │
      └──────────────── condemn(server) ◀── probe off ───────────────┘

   coroutine     consumes                      waits for                            unblocked by
   handlers      one message each              what its answer needs (long poll)    _changed
   _watch        processes                     a death                              every 0.2 s
   _follow_fleet fleet.events                  joined, left, given_up               fleet
   _watch_for_.. watchdog                      a stall                              every second
   fleet.run     servers                       health                               its own clock
   requests      files of the user             a command                            every 0.5 s

When a rank of the trainer dies, all ranks start again from the latest checkpoint, and are given the recorded plans of the steps that
were done since. These come out the same, so nothing else has to go back: the servers keep their weights, the ledger stands.

Shutdown, in this order: stop_requested is set (Ctrl-C, the last step, or a failure); workers are told to stop; the trainer is told
to save, then to stop; trainer, workers and servers are waited for, and killed after a grace.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from megatron_rl.batching import Spool, build_probe, build_step
from megatron_rl.config import Config, RunFolder
from megatron_rl.errors import RunError
from megatron_rl.orchestrator.changes import Changes
from megatron_rl.orchestrator.checkpoints import restore, seal_checkpoint
from megatron_rl.orchestrator.dispatcher import Dispatcher
from megatron_rl.orchestrator.fleet import GONE, Fleet
from megatron_rl.orchestrator.observer import Observer
from megatron_rl.orchestrator.probes import Probe
from megatron_rl.orchestrator.ranks import TrainerRanks, is_rank
from megatron_rl.orchestrator.requests import Requests
from megatron_rl.orchestrator.state import RunState
from megatron_rl.orchestrator.watchdog import Watchdog
from megatron_rl.processes import Process, log_tail
from megatron_rl.records import GroupResult, GroupTask, StepPlan
from megatron_rl.wire.control import (
    Ack,
    GroupReport,
    Order,
    OrderRequest,
    ProbeOrder,
    ProbeReport,
    ProbeRequest,
    Progress,
    Rendezvous,
    RendezvousRequest,
    SavedReport,
    Status,
    StepReport,
    WeightsReport,
    WorkOrder,
    WorkRequest,
)  # fmt: skip

Handler = Callable[..., Awaitable[object]]

MAX_FAILURES_IN_A_ROW = 50
"""Groups that fail one after the other, without one that succeeds, before the run is given up: it would never make a step."""


class RunFailedError(RunError, RuntimeError):
    """The run cannot go on; the message names what failed and what can be done."""


class Orchestrator:
    """Owns the state of the run and answers workers and trainer. `observe` gets every step's metrics and every event."""

    def __init__(self, config: Config, folder: RunFolder, state: RunState, fleet: Fleet, observe: Observer, step: int = 0):
        self.config, self.folder, self.state, self.fleet, self.observe = config, folder, state, fleet, observe
        self.spool = Spool(folder.path)
        self.step = step
        """The step that the trainer does next; also the version of its weights."""
        self.saved_step = step
        """Nothing is lost by leaving here: a step that was saved, or the start."""
        self.stop_requested = False
        self.watchdog = Watchdog(config.run.stall_after_s)
        self._probe: Probe | None = None
        self._found_right: dict[str, int] = {}
        """By server, the last version whose probe agreed."""
        self._syncing: tuple[str, ...] = ()
        """Servers in an update whose end the trainer has not yet told."""
        self._plan_file: str | None = None
        self.spool.clean_half_written()  # what an interrupted run left; nobody writes yet
        self._recorded = self._adopt_recorded_plans()
        self._draw_lost_payloads_again()
        self._dispatcher = Dispatcher(state, fleet, config.groups_per_server)
        self._batch_examples: dict[str, tuple[dict, ...]] = {}
        self._changed = Changes()
        self._failure: RunFailedError | None = None
        self._token_clock = time.monotonic()
        self._tokens = 0

    @property
    def handlers(self) -> dict[str, tuple[type, Handler]]:
        handlers = {
            "/work": (WorkRequest, self.on_work), "/groups": (GroupReport, self.on_group), "/rendezvous": (RendezvousRequest, self.on_rendezvous),
            "/order": (OrderRequest, self.on_order),
            "/step": (StepReport, self.on_step), "/weights": (WeightsReport, self.on_weights), "/probe": (ProbeRequest, self.on_probe),
            "/probed": (ProbeReport, self.on_probed), "/saved": (SavedReport, self.on_saved), "/progress": (Progress, self.on_progress),
        }  # fmt: skip
        return {path: (kind, self._heard(path, handler)) for path, (kind, handler) in handlers.items()}

    def _heard(self, path: str, handler: Handler) -> Handler:
        """The handler, noted by the watchdog. A disk that cannot be written ends the run by name: what lies there already is whole."""

        async def hear(message: object) -> object:
            self.watchdog.hear(path, message)
            try:
                answer = await handler(message)
            except OSError as error:
                where = error.filename or self.folder.path
                self.fail(
                    f"{where}: {error.strerror or error}; nothing is lost: mend this, then --resume goes on from what is written"
                )
                await self._changed.tell()
                raise
            self.watchdog.answer(path, answer)
            return answer

        return hear

    # ---- workers

    async def on_work(self, request: WorkRequest) -> WorkOrder:
        tasks: tuple[GroupTask, ...] = ()

        def found() -> bool:
            nonlocal tasks
            tasks = () if self.stop_requested else self._dispatcher.deal(request, self._probe)
            return bool(tasks) or self.stop_requested

        await self._changed.wait_until(found, request.wait_s)
        return WorkOrder(tasks, stop=self.stop_requested)

    async def on_group(self, report: GroupReport) -> Ack:
        result = report.result
        if self._probe and result.uid in self._probe.under_way:
            self._probe.end(result)
        elif self.state.end(self._if_it_counts(result)):
            self.watchdog.moved()
            self._tokens += sum(r.num_completion_tokens for r in result.rollouts)
            self._batch_examples[result.uid] = result.examples
        if result.failure == "server":
            self.fleet.group_failed(result.server, result.message)
        elif result.failure is None:
            self.fleet.group_succeeded(result.server)
        if result.failure is not None:
            self.observe.event(f"group {result.uid} failed ({result.failure}): {result.message}")
        failures = sum(self.state.recent_failures.values())
        if failures >= MAX_FAILURES_IN_A_ROW:
            self.fail(
                f"{failures} groups in a row have failed {dict(self.state.recent_failures)}, the last by {self.state.last_failure}"
            )
        await self._changed.tell()
        return Ack()

    def _if_it_counts(self, result: GroupResult) -> GroupResult:
        """What a condemned server still answers is drawn again."""
        if result.failure is None and self.fleet.is_condemned(result.server):
            return replace(result, failure="server", message="its server was condemned meanwhile")
        return result

    # ---- the trainer

    async def on_rendezvous(self, request: RendezvousRequest) -> Rendezvous:
        if request.port:
            self.ranks.rendezvous = Rendezvous(request.host, request.port)
            await self._changed.tell()
        await self._changed.wait_until(lambda: self.ranks.rendezvous.port or self._failure, request.wait_s)
        return self.ranks.rendezvous

    async def on_order(self, request: OrderRequest) -> Order:
        self.ranks.ask_for_orders()
        if request.step < self.step:
            return self._order_again(request.step)
        if request.step > self.step:
            self.fail(f"the trainer is at step {request.step}, the orchestrator at step {self.step}: start again with --resume")
        order = Order("wait")

        def decided() -> bool:
            nonlocal order
            order = self._next_order()
            return order.kind != "wait"

        await self._changed.wait_until(decided, request.wait_s)
        if order.kind == "stop":
            await self._changed.tell()  # workers wait for groups that will not come
        return order

    def _next_order(self) -> Order:
        done = self.step >= self.config.run.steps
        if self._failure:
            return Order("stop")
        due = self.step and self.step % self.config.checkpoint.every == 0
        if (due or done or self.stop_requested) and self.saved_step != self.step:
            return Order("save")
        if done or self.stop_requested:
            self.stop_requested = True
            return Order("stop")
        stale = self.fleet.to_sync(self.step)
        if stale and not self._starting():
            self._syncing = tuple(s.url for s in stale)
            return Order("sync", servers=self._syncing)
        if self._plan_file is None and self._recorded:
            plan = self._recorded.pop(0)
            self._plan_file = self.spool.plan_name(plan.step)
            self.observe.batch(plan.summary, ())
        elif self._plan_file is None and (groups := self.state.take_step()):
            plan = build_step(self.step, groups, self.config.objective.advantage)
            self._plan_file = self.spool.write_plan(plan)
            self.observe.batch(plan.summary, [e for g in groups for e in self._batch_examples.pop(g.uid, ())])
        return Order("train", plan_file=self._plan_file) if self._plan_file else Order("wait")

    def _order_again(self, step: int) -> Order:
        """For a trainer that was started again: a step that was done before. Nothing is saved before it has caught up, since the state
        here is that of a later step.
        """
        if self.stop_requested:
            return Order("stop")
        plan = self.spool.path(self.spool.plan_name(step))
        if fault := self.spool.fault(step) if plan.exists() else f"{plan} is gone":
            self.fail(f"step {step} cannot be done again: {fault}; --resume draws anew from there on")
            return Order("stop")
        return Order("train", plan_file=self.spool.plan_name(step))

    def _adopt_recorded_plans(self) -> list[StepPlan]:
        """Plans of this step and those behind it that the spool holds from before an interruption; one that is not whole ends the row."""
        plans: list[StepPlan] = []
        while (plan := self.spool.recorded(self.step + len(plans))) is not None:
            self.state.adopt(plan)
            plans.append(plan)
        if fault := self.spool.fault(self.step + len(plans)):
            self.observe.event(f"{fault}; steps from {self.step + len(plans)} on are drawn anew")
        if plans:
            self.observe.event(f"steps {plans[0].step}..{plans[-1].step} are done again from their recorded plans")
        return plans

    def _draw_lost_payloads_again(self) -> None:
        """Finished groups of the checkpoint whose payloads the spool has no longer."""
        lost = self.state.discard_finished(
            lambda group: not all(self.spool.path(rollout.file).exists() for rollout in group.rollouts), "interrupted"
        )
        if lost:
            self.observe.event(f"{lost} finished groups are no longer in {self.spool.rollouts} and are drawn again")

    def _starting(self) -> bool:
        """At the start of a run the trainer waits for all servers, so that one update serves them all."""
        never_synced = all(s.version is None for s in self.fleet.servers)
        return never_synced and any(s.state == "starting" for s in self.fleet.servers)

    async def on_step(self, report: StepReport) -> Ack:
        if report.step < self.step:  # sent again, since our answer was lost on the way; or done again after a restart
            self.watchdog.moved()
            return Ack()
        self.ranks.finish_step()
        self.state.ledger.trained(report.step)
        self.step, self._plan_file = report.step + 1, None
        self.watchdog.moved()
        now = time.monotonic()
        rate, self._token_clock, self._tokens = self._tokens / (now - self._token_clock), now, 0
        self.observe.step(report.step, report.metrics, rollout_tokens_per_s=rate, ledger=self.state.ledger.summary())
        await self._changed.tell()
        return Ack()

    async def on_weights(self, report: WeightsReport) -> Ack:
        self._syncing = ()
        for url in report.servers:
            self.fleet.synced(url, report.version)
        for url, reason in report.failed.items():
            self.fleet.condemn(url, reason)
            self.observe.event(f"{url}: {reason}")
        if report.version % self.config.weight_sync.probe_every == 0 and report.servers:
            self._probe = Probe.on(list(report.servers), report.version, self.config.weight_sync.probe_prompts)
        await self._changed.tell()
        return Ack()

    async def on_probe(self, request: ProbeRequest) -> ProbeOrder:
        probe = self._probe
        if probe is None or probe.version != request.version:
            return ProbeOrder(ready=True)
        await self._changed.wait_until(lambda: probe.ended or self.stop_requested, request.wait_s)
        if not probe.ended:
            return ProbeOrder(ready=self.stop_requested)
        if not probe.results:
            self._judge(probe, {})
            return ProbeOrder(ready=True)
        return ProbeOrder(ready=True, plan_file=self.spool.write_plan(build_probe(request.version, probe.results), kind="probe"))

    async def on_probed(self, report: ProbeReport) -> Ack:
        if self._probe and self._probe.version == report.version:
            self._judge(self._probe, report.abs_dlogp)
        return Ack()

    def _judge(self, probe: Probe, abs_dlogp: dict[str, float]) -> None:
        """Condemn the servers that a probe convicts; what they have sampled since they were last found right is not trained."""
        self._probe = None
        convicted = probe.verdict(abs_dlogp, self.config.probe_tolerance)
        for server, reason in convicted.items():
            right = self._found_right.get(server, -1)
            self.fleet.condemn(server, reason)
            lost = self.state.discard_finished(
                lambda group, of=server, since=right: group.server == of and max(r.max_version for r in group.rollouts) > since,
                "unverified",
            )
            self.observe.event(f"{server}: {reason}; {lost} finished groups of its are drawn again")
        self._found_right |= {r.server: probe.version for r in probe.results if r.server not in convicted}

    async def on_saved(self, report: SavedReport) -> Ack:
        """The trainer's part lies in a folder with another name; with the orchestrator's part the checkpoint is whole, and gets its own."""
        aside = Path(report.folder)
        if self.saved_step == report.step and not aside.exists():  # sent again, since our answer was lost on the way
            return Ack()
        final = self.folder.checkpoint(report.step)
        seal_checkpoint(aside, final, report.step, self.state)
        self.saved_step = report.step
        for _, old in self.folder.whole_checkpoints()[: -self.config.checkpoint.keep]:
            shutil.rmtree(old)
        if (steps := self.config.checkpoint.spool_steps) is not None:
            await asyncio.to_thread(self.spool.forget, self.folder.whole_checkpoints()[0][0] - steps)
        self.observe.event(f"checkpoint: {final}")
        await self._changed.tell()
        return Ack()

    async def on_progress(self, report: Progress) -> Ack:
        self.observe.progress(report)
        return Ack(stop=self.stop_requested)

    # ---- the loop

    async def run(self, processes: list[Process], start_trainer: Callable[[], Awaitable[list[Process]]]) -> None:
        """Until the trainer has left. Raises RunFailedError; the processes are the caller's to stop.

        start_trainer: all ranks, from the latest checkpoint, once none runs any more. They take the places of the former in `processes`.
        """
        self.ranks = TrainerRanks(self.config.trainer.max_restarts, start_trainer)
        requests = Requests(self.folder, self.fleet)
        loops = (self.fleet.run(), self._follow_fleet(), requests.follow(), self._watch(processes), self._watch_for_stalls())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            while not (self.stop_requested and self._trainers_left(processes)) and self._failure is None:
                done, _ = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                tasks = [t for t in tasks if t not in done]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure:
            raise self._failure

    def request_stop(self) -> None:
        """Ctrl-C: finish the step under way, save, stop."""
        self.stop_requested = True
        asyncio.get_running_loop().create_task(self._changed.tell())

    def fail(self, reason: str) -> None:
        self._failure = self._failure or RunFailedError(reason)
        self.stop_requested = True

    @property
    def failure(self) -> str:
        """Why the run cannot go on; '' while it can."""
        return str(self._failure or "")

    async def _watch(self, processes: list[Process]) -> None:
        """A process that ends ends the run, except one that was told to stop and left well, the trainer, which starts again, and a worker
        that is not the last one.
        """
        while True:
            for process in processes:
                status = process.poll()
                if status is None or (self.stop_requested and status == 0):
                    continue
                if not self.stop_requested and self._goes_on_without(process, processes):
                    break
                if not is_rank(process) or self.stop_requested:
                    self.fail(process.failure())
                elif reason := self.ranks.why_not_again():
                    self.fail(f"{process.failure()}\n  the trainer is not started again: {reason}")
                else:
                    await self._start_trainer_again(processes, process)
                    break
                await self._changed.tell()
            await asyncio.sleep(0.2)

    def _goes_on_without(self, dead: Process, processes: list[Process]) -> bool:
        """Whether the dead one is a worker among others, which then sample again what it had begun."""
        others = [p for p in processes if p.name.startswith("worker") and p.poll() is None]
        if not dead.name.startswith("worker") or not others:
            return False
        processes.remove(dead)
        lost = self._dispatcher.lose_worker(dead.name, self._probe)
        self.observe.event(f"{dead.failure()}\n  the other workers go on; {lost} groups are drawn again")
        return True

    async def _start_trainer_again(self, processes: list[Process], dead: Process) -> None:
        _, begin = restore(self.config, self.folder, self.observe.event)
        self.saved_step = min(self.saved_step, begin)
        place = self.folder.checkpoint(begin) if begin else "the start"
        self.observe.event(f"{dead.failure()}\n  the trainer starts again from {place}, up to step {self.step}")
        self._probe = None
        for url in self._syncing if self.config.servers.tensor > 1 else ():
            # The workers of a server lose step with one another when an update breaks off; a lone one is made whole by the next.
            self.fleet.condemn(url, "the trainer ended in the middle of its update")
        await self.ranks.start_again(processes)

    async def _watch_for_stalls(self) -> None:
        while True:
            if message := self.watchdog.stall(self.step, self.state, self.fleet.servers):
                self.observe.event(message)
            await asyncio.sleep(1.0)

    def _trainers_left(self, processes: list[Process]) -> bool:
        return all(process.poll() is not None for process in processes if is_rank(process))

    async def _follow_fleet(self) -> None:
        while True:
            event = await self.fleet.events.get()
            if event.kind != "joined":
                lost = self.state.lose_server(event.url)
                if self._probe:
                    self._probe.lose_server(event.url)
                self.observe.event(
                    f"server {event.slot} at {event.url} {event.kind.replace('_', ' ')}: {event.reason}; {lost} groups are drawn again"
                )
            if all(s.state in GONE for s in self.fleet.servers):
                log = self.folder.logs / f"server-{event.slot}.log"
                self.fail(f"no rollout server is left; the last: {event.reason}; the end of {log}:\n{log_tail(log)}")
            await self._changed.tell()

    def status(self) -> Status:
        version = min((s.version for s in self.fleet.ready()), default=-1)
        return Status(self.step, version, {s.url or f"server {s.slot}": s.state for s in self.fleet.servers})
