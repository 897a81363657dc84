"""From rollouts to what a trainer rank consumes: advantages, the choice of a step, packing, the spool."""

from megatron_rl.batching.microbatch import Microbatch

__all__ = ["Microbatch"]
