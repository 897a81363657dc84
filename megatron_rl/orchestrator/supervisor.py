"""The processes of a run, watched: which deaths end the run, which are answered by a restart or by the others."""

import asyncio
from collections.abc import Awaitable, Callable

from megatron_rl.orchestrator.checkpoints import restore
from megatron_rl.orchestrator.context import RunContext
from megatron_rl.orchestrator.dispatcher import Dispatcher
from megatron_rl.orchestrator.fleet import GONE
from megatron_rl.orchestrator.observer import counted
from megatron_rl.orchestrator.ranks import TrainerRanks, is_rank
from megatron_rl.orchestrator.requests import Requests
from megatron_rl.processes import Process, log_tail


class Supervisor:
    """Watches workers and ranks, follows the fleet, and ends the run when it is over or cannot continue.

    Args:
        processes: Workers and ranks; a restart replaces the ranks in it.
        start_trainer: Ends what is left of the ranks, then starts all of them from the latest checkpoint.
    """

    def __init__(
        self,
        context: RunContext,
        ranks: TrainerRanks,
        dispatcher: Dispatcher,
        processes: list[Process],
        start_trainer: Callable[[], Awaitable[list[Process]]],
    ) -> None:
        self._context, self._ranks, self._dispatcher = context, ranks, dispatcher
        self._processes, self._start_trainer = processes, start_trainer

    async def run(self) -> None:
        """Until the trainer has ended.

        Raises:
            RunFailedError: The run cannot continue.
        """
        context = self._context
        requests = Requests(context.folder, context.fleet)
        loops = (context.fleet.run(), self._follow_fleet(), requests.follow(), self._watch_processes(), self._watch_for_stalls())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            while not (context.stop_requested and self._trainer_has_ended()) and context.failure is None:
                done, _ = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                tasks = [t for t in tasks if t not in done]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if context.failure:
            raise context.failure

    async def _watch_processes(self) -> None:
        """A process that fails is replaced where the run can continue, else it ends the run.

        One that got the order to stop and exits with status 0 has not failed.
        """
        while True:
            failed = next((process for process in self._processes if self._has_failed(process)), None)
            if failed is not None:
                await self._handle_failure(failed)
            await asyncio.sleep(0.2)

    def _has_failed(self, process: Process) -> bool:
        status = process.poll()
        return status is not None and not (self._context.stop_requested and status == 0)

    async def _handle_failure(self, dead: Process) -> None:
        context = self._context
        if context.stop_requested:
            context.fail(dead.failure())
        elif self._is_one_of_several_workers(dead):
            self._continue_without(dead)
        elif not is_rank(dead):
            context.fail(dead.failure())
        elif reason := self._ranks.why_no_restart():
            context.fail(f"{dead.failure()}\n  the trainer is not restarted: {reason}")
        else:
            await self._restart_trainer(dead)
        await context.changes.notify()

    def _is_one_of_several_workers(self, dead: Process) -> bool:
        others = [p for p in self._processes if _is_worker(p) and p.poll() is None]
        return _is_worker(dead) and bool(others)

    def _continue_without(self, worker: Process) -> None:
        """The other workers sample again what this one had begun."""
        context = self._context
        self._processes.remove(worker)
        lost = self._dispatcher.lose_worker(worker.name, context.probe)
        context.observe.event(f"{worker.failure()}\n  the other workers continue; {counted(lost, 'group')} will be sampled again")

    async def _restart_trainer(self, dead: Process) -> None:
        context = self._context
        _, begin = restore(context.config, context.folder, context.observe.event)
        context.saved_step = min(context.saved_step, begin)
        place = context.folder.checkpoint(begin) if begin else "the start"
        context.observe.event(f"{dead.failure()}\n  the trainer is restarted from {place}, and catches up to step {context.step}")
        context.probe = None
        for url in context.syncing if context.config.servers.tensor > 1 else ():
            # The workers of a server lose step with one another when an update breaks off; a single one is completed by the next
            # update.
            context.fleet.quarantine(url, "the trainer ended during the server's weight update")
        await self._ranks.restart(self._processes, self._start_trainer)

    async def _watch_for_stalls(self) -> None:
        context = self._context
        while True:
            if message := context.watchdog.stall(context.step, context.state, context.fleet.servers):
                context.observe.event(message)
            await asyncio.sleep(1.0)

    def _trainer_has_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes if is_rank(process))

    async def _follow_fleet(self) -> None:
        """Report what becomes of each server; the run fails with the last one."""
        context = self._context
        while True:
            event = await context.fleet.events.get()
            if event.kind != "joined":
                lost = context.state.lose_server(event.url)
                if context.probe:
                    context.probe.lose_server(event.url)
                context.observe.event(
                    f"server {event.slot} at {event.url} {event.kind.replace('_', ' ')}: {event.reason}; "
                    f"{counted(lost, 'group')} will be sampled again"
                )
            if all(s.state in GONE for s in context.fleet.servers):
                log = context.folder.logs / f"server-{event.slot}.log"
                context.fail(f"no rollout server is left; the last: {event.reason}; the end of {log}:\n{log_tail(log)}")
            await context.changes.notify()


def _is_worker(process: Process) -> bool:
    return process.name.startswith("worker")
