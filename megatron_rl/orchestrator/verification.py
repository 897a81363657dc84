"""Whether each server holds the trainer's weights: a probe after a weight update, and what becomes of a server that fails it."""

from megatron_rl.batching import build_probe
from megatron_rl.orchestrator.context import RunContext
from megatron_rl.orchestrator.observer import counted
from megatron_rl.orchestrator.probes import Probe
from megatron_rl.records import GroupResult
from megatron_rl.wire.control import Ack, ProbeOrder, ProbeReport, ProbeRequest, WeightsReport


class Verification:
    """The trainer's messages about weights: what it has sent to which servers, and how their probes score."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._last_verified: dict[str, int] = {}
        """By server, the last version whose probe agreed."""

    async def on_weights(self, report: WeightsReport) -> Ack:
        """An update has ended.

        Servers that hold the version take work, the others are quarantined; a probe begins where it is due.
        """
        context = self._context
        context.syncing = ()
        for url in report.servers:
            context.fleet.synced(url, report.version)
        for url, reason in report.failed.items():
            context.fleet.quarantine(url, reason)
            context.observe.event(f"{url}: {reason}")
        sync = context.config.weight_sync
        if report.version % sync.probe_every == 0 and report.servers:
            context.probe = Probe.on(list(report.servers), report.version, sync.probe_prompts)
        await context.changes.notify()
        return Ack()

    async def on_probe(self, request: ProbeRequest) -> ProbeOrder:
        """The probe's rollouts for the trainer to score, once they are sampled."""
        context = self._context
        probe = context.probe
        if probe is None or probe.version != request.version:
            return ProbeOrder(ready=True)
        await context.changes.wait_until(lambda: probe.ended or context.stop_requested, request.wait_s)
        if not probe.ended:
            return ProbeOrder(ready=context.stop_requested)
        if not probe.results:
            self._evaluate(probe, {})
            return ProbeOrder(ready=True)
        plan = build_probe(request.version, probe.results)
        return ProbeOrder(ready=True, plan_file=context.spool.write_plan(plan, kind="probe"))

    async def on_probed(self, report: ProbeReport) -> Ack:
        """The trainer has scored the probe."""
        probe = self._context.probe
        if probe and probe.version == report.version:
            self._evaluate(probe, report.abs_dlogp)
        return Ack()

    def _evaluate(self, probe: Probe, abs_dlogp: dict[str, float]) -> None:
        """Quarantine the servers that fail the probe; what they have sampled since their last verified version is not trained."""
        context = self._context
        context.probe = None
        failed = probe.evaluate(abs_dlogp, context.config.probe_tolerance)
        for server, reason in failed.items():
            context.fleet.quarantine(server, reason)
            lost = self._discard_unverified(server)
            context.observe.event(f"{server}: {reason}; {counted(lost, 'finished group')} from this server will be sampled again")
        self._last_verified |= {r.server: probe.version for r in probe.results if r.server not in failed}

    def _discard_unverified(self, server: str) -> int:
        verified = self._last_verified.get(server, -1)

        def is_unverified(group: GroupResult) -> bool:
            return group.server == server and max(r.max_version for r in group.rollouts) > verified

        return self._context.state.discard_finished(is_unverified, "unverified")
