"""The RL objective of a run: policy term, correction, KL and denominator, as the config names them."""

import torch
from torch import Tensor

from megatron_rl.config.sections import Objective
from megatron_rl.errors import RunError
from megatron_rl.objective.correction import bounded, correction_weights, on_policy_sequences, reference_kl
from megatron_rl.objective.measure import Measured
from megatron_rl.objective.mismatch import measure_mismatch
from megatron_rl.objective.surrogate import SURROGATES, ClipRange
from megatron_rl.objective.token_batch import TokenBatch


class MissingReferenceError(RunError, ValueError):
    """The objective has a KL to the reference, and a batch comes without the reference's log-probs."""


class PolicyLoss:
    """The RL loss of one microbatch: sum over its loss tokens of w (m s + c k), over the update's denominator.

    s is the policy term (grpo, gspo, cispo), w the correction, m the off-policy sequence mask, which masks s alone (as its source
    does), c k the KL to the reference. So w makes s and k right for tokens sampled from p_rollout. Denominator: the update's loss
    tokens; or its sequences, each token then divided by its sequence's loss tokens. The losses of microbatches and ranks add up.

    p_old: with old_policy 'rollout' the recorded log-probs. With 'recomputed' the batch's old_logprobs, or, where it has none,
    those being trained, detached: right for a step of one update, in which p_old is p, and without the second forward.

    Args:
        objective: The config's section.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._surrogate = SURROGATES[objective.name]
        self._clip = ClipRange(objective.clip_low, objective.clip_high)

    @property
    def needs_reference(self) -> bool:
        """Whether every batch must bring reference_logprobs."""
        return self.objective.kl_coefficient > 0

    def needs_old_forward(self, updates_per_step: int) -> bool:
        """Whether a forward before the first update must give old_logprobs: from the second update on p is not p_old."""
        return self.objective.old_policy == "recomputed" and updates_per_step > 1

    def __call__(self, log_probs: Tensor, batch: TokenBatch) -> tuple[Tensor, Measured]:
        """Compute the loss.

        Without loss tokens it is 0 and still depends on log_probs, so that every rank runs the same backward.

        Args:
            log_probs: f32 [N] over the microbatch's positions, with gradient.
            batch: The microbatch's loss tokens.

        Returns:
            The scalar loss and its metrics.

        Raises:
            MissingReferenceError: The objective needs the reference's log-probs, and the batch has none.
        """
        logp = log_probs[batch.position]
        old = self._old_logprobs(logp, batch)
        log_ratio = bounded(logp - old)
        term, clipped = self._surrogate(log_ratio, logp, batch, self._clip)
        weights = correction_weights(old, batch, self.objective)
        kept = self._kept(logp, batch)
        measured = Measured()
        per_token = torch.where(kept, term, 0.0)
        if self.needs_reference:
            kl = self._reference_kl(log_ratio, logp, batch)
            per_token = per_token + self.objective.kl_coefficient * kl
            measured.mean("kl_reference", kl)
        loss = self._normalised(weights * per_token, batch)
        measured.sum("loss", loss)
        measured.mean("clip_fraction", clipped)
        self._measure_correction(measured, weights, kept)
        _measure_tokens(measured, batch)
        measure_mismatch(measured, logp.detach(), batch)
        return loss, measured

    def _old_logprobs(self, logp: Tensor, batch: TokenBatch) -> Tensor:
        if self.objective.old_policy == "rollout":
            return batch.rollout_logprobs
        return logp.detach() if batch.old_logprobs is None else batch.old_logprobs

    def _kept(self, logp: Tensor, batch: TokenBatch) -> Tensor:
        delta = self.objective.off_policy_sequence_delta
        return torch.ones_like(batch.singleton) if delta is None else on_policy_sequences(logp, batch, delta)

    def _reference_kl(self, log_ratio: Tensor, logp: Tensor, batch: TokenBatch) -> Tensor:
        if batch.reference_logprobs is None:
            raise MissingReferenceError(
                f"objective.kl_coefficient = {self.objective.kl_coefficient} needs the reference's log-probs in each TokenBatch; "
                "call Engine.keep_reference before the first step"
            )
        return reference_kl(log_ratio, logp, batch.reference_logprobs)

    def _normalised(self, per_token: Tensor, batch: TokenBatch) -> Tensor:
        if self.objective.normalisation == "token":
            return per_token.sum() / batch.denominators.tokens
        return (per_token / batch.sequence_tokens[batch.sequence]).sum() / batch.denominators.sequences

    @staticmethod
    def _measure_correction(measured: Measured, weights: Tensor, kept: Tensor) -> None:
        measured.mean("correction_weight_mean", weights)
        measured.extreme("correction_weight_min", weights, "min")
        measured.extreme("correction_weight_max", weights, "max")
        measured.mean("masked_fraction", (weights == 0) | ~kept)


def _measure_tokens(measured: Measured, batch: TokenBatch) -> None:
    """Properties of the batch: singleton_share, token_staleness_*, and entropy_keep_set where the engine gives entropies."""
    measured.mean("singleton_share", batch.singleton)
    measured.mean("token_staleness_mean", batch.staleness)
    measured.extreme("token_staleness_max", batch.staleness, "max")
    if batch.entropy is not None:
        measured.mean("entropy_keep_set", batch.entropy, batch.has_set)
