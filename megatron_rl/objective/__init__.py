"""Losses over the sampled tokens; each states its denominator, and its value does not depend on how a batch is split."""

from megatron_rl.objective.measure import Measured
from megatron_rl.objective.mismatch import mismatch_metrics
from megatron_rl.objective.policy import PolicyLoss
from megatron_rl.objective.ratio_quantiles import NUM_BINS, ratio_counts, ratio_quantiles
from megatron_rl.objective.supervised import SupervisedLoss
from megatron_rl.objective.token_batch import Denominators, TokenBatch, token_batch

__all__ = [
    "NUM_BINS",
    "Denominators",
    "Measured",
    "PolicyLoss",
    "SupervisedLoss",
    "TokenBatch",
    "mismatch_metrics",
    "ratio_counts",
    "ratio_quantiles",
    "token_batch",
]
