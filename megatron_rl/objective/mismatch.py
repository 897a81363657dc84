"""How far the trainer's distribution is from the sampler's on the tokens that were sampled. No gradients, nothing that trains."""

import torch
from torch import Tensor

from megatron_rl.objective.measure import Measured
from megatron_rl.objective.token_batch import TokenBatch

OFF_RATIO = 0.1


def mismatch_metrics(log_probs: Tensor, batch: TokenBatch) -> Measured:
    """Of log_probs [N] against the recorded ones, on a microbatch of any rollouts; at equal weights when these are probes.

    num_loss_tokens says how many tokens the means are over, so that several probes can be put together.
    """
    measured = Measured()
    measured.sum("num_loss_tokens", batch.sequence_tokens.sum())
    measure_mismatch(measured, log_probs.detach()[batch.position], batch)
    return measured


def measure_mismatch(measured: Measured, logp: Tensor, batch: TokenBatch) -> None:
    """logp: f32 [M]. With d = log p - log p_rollout, over loss tokens:

    mismatch_kl_k1 = -mean(d), the alarm; mismatch_kl_k3 = mean(exp(d) - 1 - d), which is blind where the supports differ;
    abs_dlogp_mean, abs_dlogp_max; ratio_mean = mean(exp(d)); ratio_off_share, of |exp(d) - 1| > .1. The same but for the maximum
    for .../singleton and .../sampled (wider sets), and for .../staleness_0, 1, 2, ... versions between sampling and step.
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
