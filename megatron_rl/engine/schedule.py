"""One run of Megatron's pipeline schedule over a step's microbatches."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.batching import alignment_of
from megatron_rl.engine.batch import DeviceMicrobatch
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.replay import RoutingReplay
from megatron_rl.errors import RunError

Finish = Callable[[Tensor, DeviceMicrobatch], tuple[Tensor, Any]]
"""Runs on the last stage: (hidden states, microbatch) to (a scalar to differentiate, what is kept of the microbatch)."""


class ScheduleError(RunError, ValueError):
    """Microbatches that no schedule of this layout can run."""


class Schedule:
    """Forward and backward passes of one model on one rank.

    Args:
        chunks: The model's virtual pipeline chunks, wrapped for training.
        replay: The handles of the same chunks' routers.
        groups: This rank's process groups.
        rank_multiple: The positions that a rank's linear layers see are a multiple of this.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], replay: RoutingReplay, groups: ParallelGroups, rank_multiple: int
    ) -> None:
        self._chunks, self._replay, self._groups, self._rank_multiple = list(chunks), replay, groups, rank_multiple
        for chunk in self._chunks:
            # The loss is divided by its global denominator already: Megatron must not divide the gradients by a number of tokens.
            chunk.module.config.finalize_model_grads_func = lambda model, num_tokens=None, **kwargs: finalize_model_grads(
                model, None, **kwargs
            )

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches is a multiple of this."""
        return self._groups.layout.pp if self._groups.layout.vpp > 1 else 1

    def run(
        self, microbatches: Sequence[DeviceMicrobatch], finish: Finish, *, forward_only: bool = False, reduce_fully: bool = False
    ) -> list[Any]:
        """Run all microbatches; a collective.

        Args:
            microbatches: The same number on all ranks.
            finish: Ends each microbatch's forward pass on the last stage.
            forward_only: Without gradient.
            reduce_fully: Leave the complete gradient on each data-parallel rank, not only the part that its optimizer needs.

        Returns:
            What `finish` kept of each microbatch, in order; on the last stage only, [] elsewhere.

        Raises:
            ScheduleError: The layout cannot run these microbatches.
        """
        self._check(microbatches)
        self._set_training(not forward_only)
        try:
            with torch.set_grad_enabled(not forward_only):
                kept = get_forward_backward_func()(
                    forward_step_func=partial(self._forward_step, finish, not forward_only),
                    data_iterator=[iter(microbatches) for _ in self._chunks],
                    model=self._chunks,
                    num_microbatches=len(microbatches),
                    seq_length=max(m.source.num_positions for m in microbatches),
                    micro_batch_size=1,
                    forward_only=forward_only,
                    force_all_reduce=reduce_fully,
                )
        except BaseException:
            self._replay.abandon()
            raise
        finally:
            self._set_training(True)
        self._replay.end_schedule()
        return kept

    def _forward_step(
        self, finish: Finish, backward_follows: bool, microbatches: Iterator[DeviceMicrobatch], chunk: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        microbatch = next(microbatches)
        number = next(n for n, own in enumerate(self._chunks) if own is chunk)
        with self._replay.bound(number, microbatch.routes, backward_follows=backward_follows):
            hidden = chunk(microbatch.tokens, microbatch.positions, None, packed_seq_params=microbatch.packing)

        def last_stage(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, keep = finish(output, microbatch)
            return value, torch.zeros((), dtype=torch.int, device=output.device), keep

        return hidden, last_stage

    def _set_training(self, training: bool) -> None:
        """A pass without gradients recomputes nothing."""
        for chunk in self._chunks:
            chunk.train(training)

    def _check(self, microbatches: Sequence[DeviceMicrobatch]) -> None:
        """All ranks must run the same number: they exchange experts and gradients, and one with fewer would hang the rest."""
        count = len(microbatches)
        extremes = torch.tensor([count, -count], device=self._groups.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        most, fewest = int(extremes[0]), -int(extremes[1])
        if fewest != most:
            raise ScheduleError(
                f"rank {self._groups.rank} has {count} microbatches, others from {fewest} to {most}; "
                "add empty ones, so that all have the same number"
            )
        if count == 0 or count % self.microbatch_multiple:
            raise ScheduleError(
                f"{count} microbatches; with this layout their number must be a positive multiple of {self.microbatch_multiple}; "
                "add empty ones"
            )
        wanted = alignment_of(self._groups.layout, self._chunks[0].module.config.sequence_parallel, self._rank_multiple)
        if uneven := [m.source.num_positions for m in microbatches if m.source.num_positions % wanted.total]:
            raise ScheduleError(
                f"microbatches of {uneven} positions; with this layout they must be multiples of {wanted.total}; "
                "pad with a separate segment"
            )
        lengths = {int(length) for m in microbatches for length in np.diff(m.source.segment_ends)}
        if uneven := sorted(length for length in lengths if length % wanted.segment):
            raise ScheduleError(
                f"sequences of {uneven} positions; with context parallelism they must be multiples of {wanted.segment}; "
                "pad their ends"
            )
        if len({m.routes is None for m in microbatches}) > 1:
            raise ScheduleError("some microbatches have routes and some have none; a schedule replays all of them or none")
