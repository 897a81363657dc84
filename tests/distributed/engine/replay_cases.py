"""Routing replay on the ranks: what changes the routes, and what must not."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.engine.replay import LayerRoutes, RouteError
from megatron_rl.engine.schedule import ScheduleError
from tests.distributed.engine.cases import Run, Setting, by_sequence, laid_out
from tests.distributed.engine.subject import contract_of, weights_of

Gradients = dict[str, Tensor]


def scores_with(rank: int, setting: Setting, shift: int) -> dict[int, np.ndarray]:
    """Log-probs with each recorded expert replaced by the one `shift` places on."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        run.microbatches = [_shifted(m, shift, contract_of(setting.model).num_experts) for m in run.microbatches]
        return run.log_probs()


def _shifted(microbatch: Microbatch, shift: int, num_experts: int) -> Microbatch:
    moved = (microbatch.routed_experts.astype(np.int64) + shift) % num_experts
    return replace(microbatch, routed_experts=np.where(microbatch.route_mask[:, None, None], moved, 255).astype(np.uint8))


def gradients_after_other_work(rank: int, setting: Setting) -> Gradients:
    """A second model in the process, a forward-only pass and a refused step come before: nothing of them is left."""
    with laid_out(setting) as groups:
        run, other = Run(groups, setting), Run(groups, setting)
        other.engine.load_weights(weights_of(setting.model, seed=1))
        other.engine.score(other.microbatches[:1] * other.engine.microbatch_multiple)
        run.engine.score(run.microbatches)
        mixed = [
            *run.microbatches[:-1],
            replace(run.microbatches[-1], routed_experts=None, route_mask=None, route_positions=None),
        ]
        # A single microbatch mixes nothing, and is scored.
        with pytest.raises(ScheduleError, match="replays all of them or none") if len(mixed) > 1 else nullcontext():
            run.engine.score(mixed * 2)
        other.step()
        return run.gradients()


def gradients_with_newest_first(rank: int, setting: Setting) -> Gradients:
    """An injected fault: recomputation takes the routes of the youngest microbatch in flight."""
    kept = LayerRoutes.unbind

    def newest_first(self: LayerRoutes, keep: bool) -> None:
        kept(self, keep)
        self._queue.rotate(1)

    LayerRoutes.unbind = newest_first
    try:
        with laid_out(setting) as groups:
            return Run(groups, setting).gradients()
    finally:
        LayerRoutes.unbind = kept


def refused_routes(rank: int, setting: Setting) -> tuple[str, dict[int, np.ndarray], dict[int, np.ndarray]]:
    """What a repeated expert in the last microbatch is refused with on every rank; scores before and after."""
    with laid_out(setting) as groups:
        run = Run(groups, setting)
        before = run.log_probs()
        good = run.microbatches[-1]
        routes = good.routed_experts.copy()
        routes[:, :, 1] = routes[:, :, 0]
        try:
            run.engine.score([*run.microbatches[:-1], replace(good, routed_experts=routes)])
            found = "nothing"
        except RouteError as error:
            found = str(error)
        return found, before, by_sequence(run.microbatches, [s.log_probs for s in run.engine.score(run.microbatches)])
