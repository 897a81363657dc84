"""Forward and backward passes of the policy over microbatches, on one rank."""

from collections.abc import Sequence

import numpy as np
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.batching import Microbatch, SequenceSlice, routed_positions
from megatron_rl.config import Config
from megatron_rl.engine.batch import DeviceMicrobatch, to_device
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.head import Head, Loss
from megatron_rl.engine.quantisation import PolicyQuantiser
from megatron_rl.engine.replay import Routes, RoutingReplay, make_routes
from megatron_rl.engine.schedule import Schedule
from megatron_rl.engine.timers import Timer
from megatron_rl.objective import Denominators, Measured
from megatron_rl.weight_mapping import ModelArchitecture


class Passes:
    """Runs the model's chunks under Megatron's schedule; every method but `prepare` is a collective.

    Args:
        config: The run's configuration.
        architecture: What the model is.
        groups: This rank's process groups.
        models: This rank's chunks, wrapped for training.
        replay: The handles of the same chunks' routers.
        quantiser: Quantiser of the same chunks' parameters.
    """

    def __init__(
        self,
        config: Config,
        architecture: ModelArchitecture,
        groups: ParallelGroups,
        models: Sequence[DistributedDataParallel],
        replay: RoutingReplay,
        quantiser: PolicyQuantiser,
    ) -> None:
        self._config, self._architecture, self._groups, self._quantiser = config, architecture, groups, quantiser
        self._schedule = Schedule(models, replay, groups, config.rank_multiple)
        self._last_chunk = models[-1].module
        self._head = Head(
            architecture.vocab_size,
            groups.tp,
            groups.cp,
            config.sequence_parallel,
            config.metrics.entropy_full_tokens,
            self._last_chunk.num_outputs,
        )
        self.timer = Timer(groups.device)
        """Counts the engine's own work in passes: the head, the loss, and their backward passes."""

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches is a multiple of this (interleaved stages require it)."""
        return self._schedule.microbatch_multiple

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """This rank's MoE layers, numbered among the model's MoE layers, in the order of its routers."""
        moe, layout = self._architecture.moe_layers, self._groups.layout
        own = layout.layers_of_stage(self._architecture.num_layers, self._groups.coords.pp)
        return tuple(moe.index(layer) for layer in own if layer in moe)

    def prepare(
        self,
        microbatches: Sequence[Microbatch],
        old_logprobs: Sequence[np.ndarray] | None = None,
        reference_logprobs: Sequence[np.ndarray] | None = None,
    ) -> list[DeviceMicrobatch]:
        """Check the routes of microbatches, and copy this rank's positions to its device.

        Args:
            microbatches: Microbatches of this data-parallel rank, N positions each.
            old_logprobs: f32 [N] of each microbatch, under the old policy.
            reference_logprobs: f32 [N] of each microbatch, under the reference policy.

        Raises:
            RouteError: Routes that a router cannot follow.
        """
        nothing = [None] * len(microbatches)
        return [
            self._to_device(microbatch, of_old, of_reference)
            for microbatch, of_old, of_reference in zip(
                microbatches, old_logprobs or nothing, reference_logprobs or nothing, strict=True
            )
        ]

    def forward_backward(
        self, prepared: Sequence[DeviceMicrobatch], loss: Loss, denominators: Denominators, *, reduce_fully: bool = False
    ) -> list[Measured]:
        """Add the gradients of a step's loss to the models' buffers.

        Args:
            prepared: From `prepare`; the same number on all ranks.
            loss: The step's loss, see head.Loss.
            denominators: What the shares of the loss are divided by.
            reduce_fully: Leave the complete gradient on each data-parallel rank, not only the part that its optimizer needs.

        Returns:
            What the loss measured of each microbatch, on the last stage; [] elsewhere.
        """

        def finish(hidden: Tensor, microbatch: DeviceMicrobatch) -> tuple[Tensor, Measured]:
            return self._head.loss(hidden, self._last_chunk.output_weight, microbatch, loss, denominators, self.timer)

        with self._quantiser.passes():
            return self._schedule.run(prepared, finish, reduce_fully=reduce_fully)

    def log_probs(self, prepared: Sequence[DeviceMicrobatch]) -> list[tuple[Tensor, Tensor]]:
        """Score microbatches without gradient.

        Args:
            prepared: From `prepare`; the same number on all ranks.

        Returns:
            Log-probabilities and entropies of each microbatch, f32 [N] each, on the last stage; [] elsewhere.
        """

        def finish(hidden: Tensor, microbatch: DeviceMicrobatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return hidden.new_zeros(()), self._head.log_probs(hidden, self._last_chunk.output_weight, microbatch)

        with self._quantiser.passes():
            return self._schedule.run(prepared, finish, forward_only=True)

    def _to_device(self, microbatch: Microbatch, old: np.ndarray | None, reference: np.ndarray | None) -> DeviceMicrobatch:
        slices = SequenceSlice.of(microbatch.segment_ends, self._groups.layout.cp, self._groups.coords.cp)
        routes = self._routes(microbatch)
        return to_device(microbatch, slices, self._groups.device, routes, old_logprobs=old, reference_logprobs=reference)

    def _routes(self, microbatch: Microbatch) -> Routes | None:
        moe, experts = self._architecture.moe, microbatch.routed_experts
        if experts is None or moe is None:
            return None
        assert microbatch.route_mask is not None
        assert microbatch.route_positions is not None
        own = routed_positions(
            microbatch.segment_ends,
            self._groups.layout,
            self._groups.coords,
            sequence_parallel=self._config.sequence_parallel,
        )
        return make_routes(
            experts,
            microbatch.route_mask,
            microbatch.route_positions,
            own=own,
            num_layers=len(self.moe_layers),
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            device=self._groups.device,
        )
