"""The only package that knows Megatron-Core: model, schedules, optimizer, routing replay, checkpoints, and the stand-in for CUDA.

    groups = start_process(config, rank, store=store)                # a torch.distributed store that all ranks reach
    engine = build_engine(config, groups, hf_config, weights)        # weights: Hugging Face names to tensors
    metrics = engine.train_step(microbatches, loss, denominators, step=0, learning_rate=1e-6)
    for name, tensor in engine.hf_tensors(): ...                     # rank 0 gets the tensors, the others None

Importing this package loads neither torch nor Megatron-Core: `start_process` does, after the stand-in for CUDA is in place.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from megatron_rl.config import Config
    from megatron_rl.engine.engine import Engine
    from megatron_rl.engine.groups import ParallelGroups


def start_process(config: "Config", rank: int, *, store: "dist.Store") -> "ParallelGroups":
    """See groups.start_process."""
    from megatron_rl.engine import groups

    return groups.start_process(config, rank, store=store)


def build_engine(
    config: "Config", groups: "ParallelGroups", hf_config: Mapping[str, Any], weights: "Mapping[str, Tensor]"
) -> "Engine":
    """The policy of `hf_config` with these weights, laid out as `groups` says, with an optimizer at its beginning."""
    from megatron_rl.engine.engine import Engine

    return Engine(config, groups, hf_config, weights)
