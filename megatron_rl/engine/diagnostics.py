"""What checks and attribution do with an engine, and training does not: complete gradients, dropout, altered weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megatron_rl.batching import Microbatch
from megatron_rl.engine.dropout import apply_dropout
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.head import Loss
from megatron_rl.engine.parameters import Weights
from megatron_rl.engine.weight_export import WeightExport
from megatron_rl.objective import Denominators
from megatron_rl.weight_mapping import HeldParameter


def full_gradients(engine: Engine, microbatches: Sequence[Microbatch], loss: Loss, denominators: Denominators) -> WeightExport:
    """Gradients of a step's loss without an update; a collective.

    The complete gradient is on every data-parallel rank, until the next step overwrites it.

    Args:
        engine: The policy on this rank.
        microbatches: Microbatches of this data-parallel rank, as many as every other's.
        loss: The step's loss, see head.Loss.
        denominators: What the shares of the loss are divided by.

    Returns:
        fp32 tensors under Hugging Face names, gathered to rank 0 as they are iterated.
    """
    engine.compute_gradients(engine.passes.prepare(microbatches), loss, denominators, reduce_fully=True)
    engine.passes.timer.read()  # the next step's seconds are its own
    return engine.export(torch.float32, engine.parameters.gradient)


def local_gradients(engine: Engine) -> Iterator[tuple[HeldParameter, Tensor]]:
    """This rank's part of what `full_gradients` computed, fp32 of the shard's shape, until the next step; no collective."""
    return ((held, engine.parameters.gradient(held)) for held in engine.parameters.held)


def altered_weights(engine: Engine, change: Callable[[HeldParameter, Tensor], Tensor]) -> Weights:
    """A copy of the current weights on the host, for `Engine.using_weights`; no collective.

    Args:
        engine: The policy on this rank.
        change: Makes each tensor of the copy from the current one.
    """
    return {(held.chunk, held.name): change(held, tensor).detach().cpu().clone() for held, tensor in engine.parameters}


def with_dropout(engine: Engine, probability: float) -> AbstractContextManager[None]:
    """Passes inside the block drop hidden states out, as no training step does.

    Args:
        engine: The policy on this rank.
        probability: Dropout probability of each element of a hidden state.
    """
    return apply_dropout(engine.chunks, probability, engine.groups.device)
