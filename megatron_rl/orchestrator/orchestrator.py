"""The asynchronous loop of a run: one event loop, no torch, only summaries of rollouts.

      ┌───────────── /work ◀── admission: staleness bound (state) ◀──────────────┐
      ▼                                                                          │ version v + 1
   workers ── /groups ──▶ ledger, buffer ── a step's groups ──▶ plan in the spool │
      ▲                                                              │ /order: train
      │ groups go only to servers that are ready                     ▼           │
    fleet ── joined: /order: sync ─────────────────────────────▶ trainer ── /step, /weights, /probed
      ▲                                                              │
      └──────────────── quarantine(server) ◀── probe failed ◀────────┘

   part               coroutine          consumes               waits for                            unblocked by
   WorkerHandlers     handlers           one message each       what its answer needs (long poll)    context.changes
   TrainerHandlers,
   Verification       handlers           one message each       what its answer needs (long poll)    context.changes
   Supervisor         _watch_processes   processes              a death                              every 0.2 s
                      _follow_fleet      fleet.events           joined, left, given_up, removed      fleet
                      _watch_for_stalls  watchdog               a stall                              every second
   Fleet              run                servers                health                               its own clock
   Requests           follow             files of the user      a command                            every 0.5 s

The parts share one RunContext. When a rank of the trainer dies, all ranks start again from the latest checkpoint, and get the
recorded plans of the steps that were done since. These come out the same, so nothing else has to go back: the servers keep
their weights, the ledger stays as it is.

Shutdown, in this order: stop_requested is set (Ctrl-C, the last step, or a failure); workers get the order to stop; the trainer
gets the order to save, then to stop; trainer, workers and servers may exit by themselves, and are killed after a grace period.
"""

from collections.abc import Awaitable, Callable

from megatron_rl.config import Config, RunFolder
from megatron_rl.orchestrator.context import RunContext
from megatron_rl.orchestrator.dispatcher import Dispatcher
from megatron_rl.orchestrator.fleet import Fleet
from megatron_rl.orchestrator.http import Handler
from megatron_rl.orchestrator.observer import Observer
from megatron_rl.orchestrator.ranks import TrainerRanks
from megatron_rl.orchestrator.state import RunState
from megatron_rl.orchestrator.supervisor import Supervisor
from megatron_rl.orchestrator.trainer_handlers import TrainerHandlers
from megatron_rl.orchestrator.verification import Verification
from megatron_rl.orchestrator.worker_handlers import WorkerHandlers
from megatron_rl.processes import Process
from megatron_rl.wire import control


class Orchestrator:
    """Composes the parts of a run: handlers for workers and trainer, and the supervisor of its processes.

    Args:
        config: Of the run.
        folder: Of the run.
        state: Its bookkeeping: new, or as a checkpoint has it.
        fleet: Of rollout servers; it starts none before `run`.
        observe: Gets every step's metrics and every event.
        step: The step that the trainer does first.
    """

    def __init__(
        self, config: Config, folder: RunFolder, state: RunState, fleet: Fleet, observe: Observer, step: int = 0
    ) -> None:
        self.context = RunContext(config, folder, state, fleet, observe, step)
        self._dispatcher = Dispatcher(state, fleet, config.groups_per_server)
        self._ranks = TrainerRanks(config.trainer.max_restarts)
        self.workers = WorkerHandlers(self.context, self._dispatcher)
        self.trainer = TrainerHandlers(self.context, self._ranks, self.workers)
        self.verification = Verification(self.context)

    @property
    def handlers(self) -> dict[str, tuple[type, Handler]]:
        """Route to the type of its message and the handler."""
        workers, trainer, verification = self.workers, self.trainer, self.verification
        handlers: dict[str, tuple[type, Handler]] = {
            "/work": (control.WorkRequest, workers.on_work),
            "/groups": (control.GroupReport, workers.on_group),
            "/rendezvous": (control.RendezvousRequest, trainer.on_rendezvous),
            "/order": (control.OrderRequest, trainer.on_order),
            "/step": (control.StepReport, trainer.on_step),
            "/saved": (control.SavedReport, trainer.on_saved),
            "/progress": (control.Progress, trainer.on_progress),
            "/weights": (control.WeightsReport, verification.on_weights),
            "/probe": (control.ProbeRequest, verification.on_probe),
            "/probed": (control.ProbeReport, verification.on_probed),
        }
        return {path: (kind, self._watched(path, handler)) for path, (kind, handler) in handlers.items()}

    async def run(self, processes: list[Process], start_trainer: Callable[[], Awaitable[list[Process]]]) -> None:
        """Until the trainer has ended. The processes are the caller's to stop.

        Args:
            processes: Workers and ranks; a restart replaces the ranks in it.
            start_trainer: Ends what is left of the ranks, then starts all of them from the latest checkpoint.

        Raises:
            RunFailedError: The run cannot continue.
        """
        await Supervisor(self.context, self._ranks, self._dispatcher, processes, start_trainer).run()

    def status(self) -> control.Status:
        """Progress and state of the run."""
        fleet = self.context.fleet
        version = min((s.version for s in fleet.ready() if s.version is not None), default=-1)
        return control.Status(self.context.step, version, {s.url or f"server {s.slot}": s.state for s in fleet.servers})

    def _watched(self, path: str, handler: Handler) -> Handler:
        """The handler, its messages noted by the watchdog.

        A disk that cannot be written ends the run with a message that names the file: what is on it already is complete.
        """
        context = self.context

        async def handle(message: object) -> object:
            context.watchdog.record_message(path, message)
            try:
                answer = await handler(message)
            except OSError as error:
                where = error.filename or context.folder.path
                context.fail(f"{where}: {error.strerror or error}; nothing is lost: fix this, then continue with --resume")
                await context.changes.notify()
                raise
            context.watchdog.record_answer(path, answer)
            return answer

        return handle
