"""AdamW through Megatron's distributed optimizer: fp32 master weights and moments, sharded over the data-parallel ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.optimizers.interface import PolicyOptimizer
from megatron_rl.engine.optimizers.megatron_state import (
    align_step_counts,
    make_states,
    padding_between_buckets,
    parts_of,
    separate_step_counts,
    slice_of,
    torch_optimizers,
)
from megatron_rl.engine.parameters import LocalParameters


class AdamW(PolicyOptimizer):
    """AdamW for all parameters. Learning rate and weight decay are set before each step."""

    name = "adamw"

    def __init__(
        self,
        config: Config,
        models: Sequence[DistributedDataParallel],
        parameters: LocalParameters,
        groups: ParallelGroups,
    ) -> None:
        section, dtype = config.optimizer, getattr(torch, config.model.dtype)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=section.learning_rate,
            min_lr=section.min_learning_rate,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.epsilon,
            clip_grad=section.max_grad_norm,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self._section, self._models = section, list(models)
        self.megatron = get_megatron_optimizer(settings, list(models))
        for optimizer in torch_optimizers(self.megatron):
            # A fused optimizer is loaded without states as well.
            if isinstance(optimizer, torch.optim.AdamW):
                make_states(optimizer)

    def zero_grad(self) -> None:
        """See PolicyOptimizer."""
        for model in self._models:
            model.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, learning_rate: float) -> float:
        """See PolicyOptimizer."""
        # Norms and other vectors are not decayed: Megatron marks their groups with a multiplier of 0.
        for group in self.megatron.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._section.weight_decay * group.get("wd_mult", 1.0)
        _, grad_norm, _ = self.megatron.step()
        return float(grad_norm)

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """See PolicyOptimizer."""
        for part in parts_of(self.megatron):
            if (found := slice_of(part, parameter)) is not None:
                updated, _, _ = found
                master = {} if updated.dtype == parameter.dtype else {"master": updated}
                state = sorted(part.optimizer.state[updated].items())
                return master | {kind: value for kind, value in state if isinstance(value, Tensor)}
        return {}

    def sharded_state_dict(
        self, model_state: Mapping[str, Any], metadata: Mapping[str, Any], *, is_loading: bool
    ) -> Mapping[str, Any]:
        """See PolicyOptimizer."""
        align_step_counts(self.megatron)
        with padding_between_buckets():
            return self.megatron.sharded_state_dict(model_state, is_loading=is_loading, metadata=dict(metadata))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See PolicyOptimizer."""
        self.megatron.load_state_dict(state)
        separate_step_counts(self.megatron)
