"""The worlds of these tests are those in which `megatron-rl check` runs."""

from megatron_rl.engine.world import CaseFailed, World

__all__ = ["CaseFailed", "World"]
