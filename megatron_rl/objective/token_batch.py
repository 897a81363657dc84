"""The loss tokens of one microbatch, as the tensors that a loss reads."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batching import Microbatch


class CountsLoss(Protocol):
    """The plan of one update: StepPlan or SupervisedPlan."""

    @property
    def num_loss_tokens(self) -> int:
        """Of all ranks, singletons counted."""

    @property
    def num_sequences(self) -> int:
        """Of all ranks."""


@dataclass(frozen=True)
class Denominators:
    """What sums over an optimizer update are divided by: the same on all ranks, for every split and packing."""

    tokens: int
    """Loss tokens of the update, singletons counted."""
    sequences: int
    """Sequences of the update."""

    @classmethod
    def of(cls, plan: CountsLoss) -> "Denominators":
        """The denominators of one update. One without loss tokens has sums of 0, which may be divided by 1."""
        return cls(tokens=max(1, plan.num_loss_tokens), sequences=max(1, plan.num_sequences))


@dataclass(frozen=True)
class TokenBatch:
    """M loss tokens of S complete sequences, in the order of their positions; the other tokens of a microbatch are left out.

    Where a sequence is split over context-parallel ranks, its log-probs are gathered before the loss.
    """

    position: Tensor  # i64 [M], place in the microbatch's N positions, rising
    sequence: Tensor  # i64 [M], 0..S-1
    sequence_tokens: Tensor  # f32 [S], loss tokens of each sequence
    rollout_logprobs: Tensor  # f32 [M]
    advantages: Tensor  # f32 [M]
    staleness: Tensor  # i64 [M]
    singleton: Tensor  # bool [M]
    has_set: Tensor  # bool [M]: scored over its keep-set
    max_staleness: int  # of these tokens; known on the host, so that nothing waits for the device
    denominators: Denominators
    old_logprobs: Tensor | None = None
    """f32 [M], the trainer's own at the start of the step; None: the step makes one update, so they are those being trained."""
    reference_logprobs: Tensor | None = None  # f32 [M]
    entropy: Tensor | None = None  # f32 [M], of the distribution that each token was scored over

    @property
    def num_tokens(self) -> int:
        """M."""
        return len(self.position)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.sequence_tokens)


def token_batch(
    microbatch: Microbatch,
    denominators: Denominators,
    device: torch.device | str = "cpu",
    *,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenBatch:
    """The loss tokens of a microbatch, as tensors.

    Args:
        microbatch: On the host, N positions.
        denominators: Of its update.
        device: Where the tensors shall be.
        old_logprobs: f32 [N], the trainer's own at the start of the step.
        reference_logprobs: f32 [N].
        entropy: f32 [N], of the distribution that each token was scored over.
    """
    position = np.flatnonzero(microbatch.loss_mask)
    _, sequence, counts = np.unique(microbatch.sequence[position], return_inverse=True, return_counts=True)
    staleness = microbatch.staleness[position]
    on_device = torch.from_numpy(position).to(device, non_blocking=True)

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)

    def chosen(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach()[on_device]

    return TokenBatch(
        position=on_device,
        sequence=tensor(sequence, torch.int64),
        sequence_tokens=tensor(counts, torch.float32),
        rollout_logprobs=tensor(microbatch.rollout_logprobs[position], torch.float32),
        advantages=tensor(microbatch.advantages[position], torch.float32),
        staleness=tensor(staleness, torch.int64),
        singleton=tensor(microbatch.singleton[position], torch.bool),
        has_set=tensor(~microbatch.full_rows[position], torch.bool),
        max_staleness=int(staleness.max(initial=0)),
        denominators=denominators,
        old_logprobs=chosen(old_logprobs),
        reference_logprobs=chosen(reference_logprobs),
        entropy=chosen(entropy),
    )
