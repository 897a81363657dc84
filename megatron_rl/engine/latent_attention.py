"""Multi-head latent attention: what Megatron-Core's modules need to compute it correctly, mostly on the CPU."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.engine.megatron_types import megatron_attributes


class ReplicatedLinear(torch.nn.Module):
    """A down projection that is replicated on every tensor-parallel rank, and sees the rank's own slice of the tokens.

    Megatron's local spec cuts it instead, and its gather has a split for backward: the gradient of the rotary key, which all
    heads share, is then that of one rank's heads (silently off by a quarter at TP = 2). Transformer Engine's spec replicates it,
    too.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Callable, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        # Each rank sees its slice of the tokens: finalize_model_grads sums the weight's gradient over the tensor-parallel group.
        megatron_attributes(self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[n, 1, inputs] to ([n, 1, outputs], no bias)."""
        return F.linear(hidden, self.weight), None


DOWN_PROJECTIONS = ("linear_q_down_proj", "linear_kv_down_proj")
"""Fields of the attention's spec that are replaced."""


def accept_replicated_linear() -> None:
    """Let MLASelfAttention take ReplicatedLinear.

    It takes known classes only; one of the names that it compares with is free without Transformer Engine.
    """
    multi_latent_attention.Linear = ReplicatedLinear
    # 0.16.1 takes Transformer Engine for installed where it is not, and asks isinstance() for what is no class.
    multi_latent_attention.HAVE_TE = False


def accept_plain_queries() -> None:
    """Let Megatron build queries without a low-rank step and without the norm before their projection (Moonlight).

    0.19 knows norms of keys and queries together only: it refuses such a layer on the CPU, and with Transformer Engine builds a
    norm into the projection that the model does not have.
    """
    if importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config") is None:  # before 0.19
        return
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    choose = QKNormConfigResolver._mla_fused_linear_or_default
    if hasattr(choose, "__wrapped__"):  # done already in this process
        return

    @functools.wraps(choose)
    def wrapped(self: Any, module_spec: Any, module_name: str) -> Any:
        plain = module_name == "linear_q_proj" and module_spec is not None
        return module_spec if plain else choose(self, module_spec, module_name)

    QKNormConfigResolver._mla_fused_linear_or_default = wrapped
