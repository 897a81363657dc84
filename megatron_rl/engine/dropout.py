"""Dropout within a block, where Megatron has it: on what attention and MLP of each layer return, and on the embedding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


@contextmanager
def apply_dropout(chunks: Sequence[GPTModel], probability: float, device: torch.device) -> Iterator[None]:
    """Drop hidden states out within the block.

    Every rank draws the same random numbers, so that ranks which hold the same hidden states drop the same ones.

    Args:
        chunks: This rank's chunks of the model.
        probability: Dropout probability of each element.
        device: Where the hidden states are.
    """
    random = torch.Generator(device).manual_seed(0)
    modules = [part for chunk in chunks for layer in chunk.decoder.layers for part in (layer.self_attention, layer.mlp)]
    modules += [chunk.embedding for chunk in chunks if hasattr(chunk, "embedding")]
    hooks = [module.register_forward_hook(partial(_dropped, random, probability)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _dropped(random: torch.Generator, probability: float, _module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
    """A forward hook. output: hidden states, or hidden states and a bias that is added later."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    kept = torch.rand(hidden.shape, generator=random, device=hidden.device) >= probability
    dropped = hidden * kept.to(hidden.dtype) / (1.0 - probability)
    return (dropped, *output[1:]) if isinstance(output, tuple) else dropped
