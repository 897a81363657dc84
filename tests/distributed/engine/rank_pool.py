"""The worlds of these tests are those in which `megatron-rl check` runs."""

from megatron_rl.engine.rank_pool import CaseFailed, RankPool

__all__ = ["CaseFailed", "RankPool"]
