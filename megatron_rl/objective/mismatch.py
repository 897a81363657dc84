"""How far the trainer's distribution is from the sampler's on the sampled tokens. Without gradients; nothing trains on it."""

import torch
from torch import Tensor

from megatron_rl.objective.measure import Measured
from megatron_rl.objective.token_batch import TokenBatch

OFF_RATIO = 0.1


def mismatch_metrics(log_probs: Tensor, batch: TokenBatch) -> Measured:
    """The mismatch of a microbatch; at equal weights where its rollouts are probes.

    Args:
        log_probs: [N] over the microbatch's positions, the trainer's.
        batch: The microbatch's loss tokens, with the recorded log-probs.

    Returns:
        The metrics of `measure_mismatch`, and num_loss_tokens, the number of tokens that the means are over.
    """
    measured = Measured()
    measured.sum("num_loss_tokens", batch.sequence_tokens.sum())
    measure_mismatch(measured, log_probs.detach()[batch.position], batch)
    return measured


def measure_mismatch(measured: Measured, logp: Tensor, batch: TokenBatch) -> None:
    """Measure the mismatch over loss tokens, with d = log p - log p_rollout.

    mismatch_kl_k1 = -mean(d), the one to watch; mismatch_kl_k3 = mean(exp(d) - 1 - d), which does not see where the supports
    differ; abs_dlogp_mean, abs_dlogp_max; ratio_mean = mean(exp(d)); ratio_off_share, the share of |exp(d) - 1| > .1. All but the
    maximum also for .../singleton and .../sampled (larger sets), and for .../staleness_0, 1, 2, ... versions between sampling and
    step.

    Args:
        measured: Gets the metrics.
        logp: f32 [M], the trainer's.
        batch: Of the same M tokens.
    """
    d = logp.double() - batch.rollout_logprobs.double()
    ratio = d.exp()
    values = {
        "mismatch_kl_k1": -d,
        "mismatch_kl_k3": ratio - 1.0 - d,
        "abs_dlogp_mean": d.abs(),
        "ratio_mean": ratio,
        "ratio_off_share": (ratio - 1.0).abs() > OFF_RATIO,
    }
    groups = {"": torch.ones_like(batch.singleton), "/singleton": batch.singleton, "/sampled": ~batch.singleton}
    groups |= {f"/staleness_{n}": batch.staleness == n for n in range(batch.max_staleness + 1)}
    measured.means(values, groups)
    measured.extreme("abs_dlogp_max", d.abs(), "max")
