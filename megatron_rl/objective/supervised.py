"""Maximum likelihood of reference solutions."""

from torch import Tensor

from megatron_rl.objective.measure import Measured
from megatron_rl.objective.token_batch import TokenBatch


class SupervisedLoss:
    """The supervised loss of one microbatch: -sum of log p over its loss tokens, over the update's number of loss tokens."""

    needs_reference = False

    def needs_old_forward(self, updates_per_step: int) -> bool:
        """As of PolicyLoss: never."""
        return False

    def __call__(self, log_probs: Tensor, batch: TokenBatch) -> tuple[Tensor, Measured]:
        """The scalar loss and its metrics. log_probs: f32 [N] over the microbatch's positions, with gradient."""
        logp = log_probs[batch.position]
        loss = -logp.sum() / batch.denominators.tokens
        measured = Measured()
        measured.sum("loss", loss)
        measured.mean("target_probability", logp.exp())
        return loss, measured
