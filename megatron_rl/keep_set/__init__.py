"""The keep-set log-softmax: exact log-probabilities over the ids that survived truncation, vocab-parallel and deterministic."""

from megatron_rl.keep_set.operation import KeepSetOutput, entropy_full, keep_set_log_probs
from megatron_rl.keep_set.reference import reference_log_probs
from megatron_rl.keep_set.sets import KeepSets, TokenKind, check_keep_sets

__all__ = [
    "KeepSetOutput",
    "KeepSets",
    "TokenKind",
    "check_keep_sets",
    "entropy_full",
    "keep_set_log_probs",
    "reference_log_probs",
]
