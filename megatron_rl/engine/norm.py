"""RMSNorm that allows sequence parallelism, on the CPU."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.engine.megatron_types import megatron_attributes


class RMSNorm(torch.nn.RMSNorm):
    """Replaces Megatron's WrappedTorchNorm, which refuses sequence parallelism; experts with tensor parallelism need it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each rank sees its slice of the tokens: finalize_model_grads sums the weight's gradient over the tensor-parallel group.
        megatron_attributes(self.weight).sequence_parallel = config.sequence_parallel
