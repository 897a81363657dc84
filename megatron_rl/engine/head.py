"""From the last stage's hidden states to log-probabilities and the loss, without logits of the full vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.engine.batch import DeviceMicrobatch
from megatron_rl.engine.context_parallel import gather_positions
from megatron_rl.engine.mtp import targets_ahead
from megatron_rl.engine.timers import StartTimerInBackward, StopTimerInBackward, Timer
from megatron_rl.keep_set import entropy_full, keep_set_log_probs
from megatron_rl.objective import Denominators, Measured, TokenBatch, token_batch

Loss = Callable[[Tensor, TokenBatch], tuple[Tensor, Measured]]
"""loss(log_probs f32 [N] with gradient, batch) -> (a share of the step's loss, metrics).

The shares of all microbatches and data-parallel ranks are summed and divided by nothing: each is divided already by the step's
denominators, which the batch carries.
"""


@dataclass(frozen=True)
class Head:
    """The output layer of one rank of the last stage."""

    vocab_size: int
    """Without padding."""
    group: dist.ProcessGroup
    """The tensor-parallel group, over which the vocabulary is cut."""
    context: dist.ProcessGroup
    """The context-parallel group, over which the positions are cut."""
    sequence_parallel: bool
    entropy_full_tokens: int
    """Loss tokens of each microbatch whose entropy over the full vocabulary is measured too; each costs a dense row."""
    num_outputs: int = 1
    """Hidden states for each position in a training pass: the policy's, then those of layers for multi-token prediction."""

    @property
    def _vocabulary_group(self) -> dist.ProcessGroup | None:
        return self.group if self.group.size() > 1 else None

    def log_probs(self, hidden: Tensor, weight: Tensor, microbatch: DeviceMicrobatch) -> tuple[Tensor, Tensor]:
        """Score the targets; a collective of both groups.

        Args:
            hidden: [n, 1, H] of this rank's positions, with sequence parallelism its slice of them.
            weight: [padded vocabulary / tp, H].
            microbatch: N positions, of which this rank holds n.

        Returns:
            Log-probabilities and entropies, f32 [N] each, the same on all ranks of both groups; zeros where there is no loss.
        """
        out = keep_set_log_probs(
            hidden.squeeze(1),
            weight,
            microbatch.keep_sets,
            temperature=microbatch.temperature,
            vocab_size=self.vocab_size,
            group=self._vocabulary_group,
            sequence_parallel=self.sequence_parallel,
        )
        assert out.entropy is not None
        both = torch.stack([out.log_probs, out.entropy], dim=1)
        # The loss may look at all of a sequence: every rank computes it from all positions, and has the gradient of its own ones.
        log_probs, entropies = gather_positions(both, microbatch.slices, self.context, sum_gradients=False).unbind(dim=1)
        return log_probs, entropies

    def loss(
        self, hidden: Tensor, weight: Tensor, microbatch: DeviceMicrobatch, loss: Loss, denominators: Denominators, timer: Timer
    ) -> tuple[Tensor, Measured]:
        """Compute one microbatch's share of the step's loss; a collective of both groups.

        Args:
            hidden: [n, 1, H] of this rank's positions, once for each of `num_outputs`, with sequence parallelism its slice.
            weight: [padded vocabulary / tp, H].
            microbatch: N positions, of which this rank holds n.
            loss: The step's loss.
            denominators: What the shares are divided by.
            timer: Counts this and its backward pass.

        Returns:
            The share, a scalar with gradient, and the microbatch's metrics.
        """
        with timer:
            hidden, *ahead = StopTimerInBackward.apply(hidden, timer).chunk(self.num_outputs)
            log_probs, entropies = self.log_probs(hidden, weight, microbatch)
            batch = token_batch(
                microbatch.source,
                denominators,
                hidden.device,
                old_logprobs=microbatch.old_logprobs,
                reference_logprobs=microbatch.reference_logprobs,
                entropy=entropies,
            )
            share, measured = loss(log_probs, batch)
            self._measure_entropy_full(measured, hidden, weight, microbatch)
            for depth, states in enumerate(ahead, start=1):
                share = share + self._loss_ahead(depth, states, weight, microbatch, denominators, measured)
            # Whatever the loss is computed from, it depends on the hidden states: other stages and expert-parallel ranks wait
            # for this microbatch's backward pass, also when it has no loss token.
            share = StartTimerInBackward.apply(share + hidden.flatten()[:0].sum(), timer)
        return share, measured

    def _loss_ahead(
        self,
        depth: int,
        hidden: Tensor,
        weight: Tensor,
        microbatch: DeviceMicrobatch,
        denominators: Denominators,
        measured: Measured,
    ) -> Tensor:
        """A layer's cross-entropy for multi-token prediction, a share like the loss's; no gradient for the output layer."""
        sets, scored = targets_ahead(microbatch.source, depth, microbatch.slices.own)
        out = keep_set_log_probs(
            hidden.squeeze(1),
            weight.detach(),
            sets,
            temperature=torch.ones_like(microbatch.temperature),
            vocab_size=self.vocab_size,
            group=self._vocabulary_group,
            sequence_parallel=self.sequence_parallel,
        )
        log_probs = gather_positions(out.log_probs, microbatch.slices, self.context, sum_gradients=False)
        measured.mean(f"mtp_loss_{depth}", -log_probs, torch.from_numpy(scored).to(log_probs.device))
        # Depends on the hidden states whatever is scored, as the loss does.
        return hidden.flatten()[:0].sum() - log_probs.sum() / denominators.tokens

    def _measure_entropy_full(self, measured: Measured, hidden: Tensor, weight: Tensor, microbatch: DeviceMicrobatch) -> None:
        """entropy_full: of loss tokens spread evenly over the microbatch, the same ones on every rank."""
        places = np.flatnonzero(microbatch.source.loss_mask)
        count = min(self.entropy_full_tokens, len(places))
        if not count:
            return
        sample, own = places[np.linspace(0, len(places) - 1, count).astype(np.int64)], microbatch.slices.own
        mine = np.isin(sample, own)
        values = hidden.new_zeros(count, dtype=torch.float32)
        if mine.any():
            values[torch.from_numpy(mine)] = entropy_full(
                hidden.detach().squeeze(1),
                weight,
                torch.from_numpy(np.searchsorted(own, sample[mine])),
                temperature=microbatch.temperature,
                vocab_size=self.vocab_size,
                group=self._vocabulary_group,
                sequence_parallel=self.sequence_parallel,
            )
        if self.context.size() > 1:
            dist.all_reduce(values, group=self.context)
        measured.mean("entropy_full", values)
