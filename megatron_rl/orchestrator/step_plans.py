"""Which step plan the trainer gets next: those that an interrupted run has left first, then new ones from the buffer."""

from collections.abc import Callable, Sequence

from megatron_rl.batching import build_step
from megatron_rl.orchestrator.context import RunContext
from megatron_rl.orchestrator.observer import counted
from megatron_rl.records import GroupResult, StepPlan


class StepPlans:
    """examples: takes the readable rollouts of the groups that a step takes."""

    def __init__(self, context: RunContext, examples: Callable[[tuple[GroupResult, ...]], Sequence[dict]]) -> None:
        self._context, self._examples = context, examples
        self._current: str | None = None
        context.spool.clean_half_written()  # from an interrupted run; no process writes yet
        self._recorded = self._adopt_recorded()
        self._discard_groups_without_payloads()

    def current(self) -> str | None:
        """File of the plan of the step that is next, built where its groups are there; None while they are not."""
        if self._current is None:
            self._current = self._next_recorded() or self._build()
        return self._current

    def finish_step(self) -> None:
        """The current plan is trained."""
        self._current = None

    def again(self, step: int) -> str | None:
        """File of the plan of a step that was done before; None, and the run fails, where it cannot be done again."""
        context = self._context
        name = context.spool.plan_name(step)
        plan = context.spool.path(name)
        if fault := context.spool.fault(step) if plan.exists() else f"{plan} is missing":
            context.fail(f"step {step} cannot be done again: {fault}; --resume samples new rollouts from this step on")
            return None
        return name

    def _next_recorded(self) -> str | None:
        if not self._recorded:
            return None
        plan = self._recorded.pop(0)
        self._context.observe.batch(plan.summary, ())
        return self._context.spool.plan_name(plan.step)

    def _build(self) -> str | None:
        context = self._context
        groups = context.state.take_step()
        if not groups:
            return None
        plan = build_step(context.step, groups, context.config.objective.advantage)
        file = context.spool.write_plan(plan)
        context.observe.batch(plan.summary, self._examples(groups))
        return file

    def _adopt_recorded(self) -> list[StepPlan]:
        """Plans of this step and of the following ones that the spool holds from before an interruption.

        An incomplete one ends the row.
        """
        context = self._context
        plans: list[StepPlan] = []
        while (plan := context.spool.recorded(context.step + len(plans))) is not None:
            context.state.adopt(plan)
            plans.append(plan)
        first_new = context.step + len(plans)
        if fault := context.spool.fault(first_new):
            context.observe.event(f"{fault}; new rollouts are sampled from step {first_new} on")
        if plans:
            context.observe.event(f"steps {plans[0].step}..{plans[-1].step} are done again from their recorded plans")
        return plans

    def _discard_groups_without_payloads(self) -> None:
        """Finished groups of the checkpoint whose payloads are no longer in the spool."""
        spool = self._context.spool
        lost = self._context.state.discard_finished(
            lambda group: not all(spool.path(rollout.file).exists() for rollout in group.rollouts), "interrupted"
        )
        if lost:
            self._context.observe.event(
                f"{counted(lost, 'finished group')} of the checkpoint will be sampled again: no payload in {spool.rollouts}"
            )
