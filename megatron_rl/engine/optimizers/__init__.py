"""The optimizers of the policy: one interface, chosen once by `optimizer.name`.

    optimizer = build_optimizer(config, models, parameters, groups)
    optimizer.zero_grad(); optimizer.begin_step(); ...passes...; grad_norm = optimizer.step(learning_rate)

A further optimizer is a class here, a name (and a section of its settings) in the config, and its costs in planner/optimizers.py.
"""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel

from megatron_rl.config import Config
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.optimizers.adamw import AdamW
from megatron_rl.engine.optimizers.interface import PolicyOptimizer
from megatron_rl.engine.optimizers.muon import Muon
from megatron_rl.engine.parameters import LocalParameters

OPTIMIZERS: dict[str, type[PolicyOptimizer]] = {optimizer.name: optimizer for optimizer in (AdamW, Muon)}

__all__ = ["OPTIMIZERS", "PolicyOptimizer", "build_optimizer"]


def build_optimizer(
    config: Config, models: Sequence[DistributedDataParallel], parameters: LocalParameters, groups: ParallelGroups
) -> PolicyOptimizer:
    """See PolicyOptimizer.__init__."""
    return OPTIMIZERS[config.optimizer.name](config, models, parameters, groups)
