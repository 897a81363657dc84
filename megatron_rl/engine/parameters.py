"""The parameters of the policy that one rank holds: their tensors, gradients, and copies of their values on the host."""

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.engine.megatron_types import megatron_attributes
from megatron_rl.engine.mtp import local_name
from megatron_rl.weight_mapping import HeldParameter, Placement

Weights = dict[tuple[int, str], Tensor]
"""One rank's weights on the host, by chunk and Megatron's name. Only an Engine of the same layout can use them."""


def tensor_of(chunk: GPTModel, name: str) -> Tensor:
    """A parameter, or a buffer that belongs to the model (the selection bias of a router).

    Args:
        chunk: One of this rank's virtual pipeline chunks.
        name: Megatron's name within the chunk.
    """
    module, _, last = local_name(name, chunk).rpartition(".")
    return getattr(chunk.get_submodule(module), last)


class LocalParameters:
    """This rank's parameters in the order of the model; iterating gives each with its tensor. Nothing here is a collective.

    Args:
        placement: Placement of the model, at the run's layout.
        rank: This process's global rank.
        chunks: This rank's virtual pipeline chunks, not yet wrapped for training.
    """

    def __init__(self, placement: Placement, rank: int, chunks: Sequence[GPTModel]) -> None:
        self.placement = placement
        self.held: tuple[HeldParameter, ...] = tuple(placement.held_by(rank).values())
        self._tensors = {(held.chunk, held.name): tensor_of(chunks[held.chunk], held.name) for held in self.held}

    def __iter__(self) -> Iterator[tuple[HeldParameter, Tensor]]:
        return ((held, self.tensor(held)) for held in self.held)

    def tensor(self, held: HeldParameter) -> Tensor:
        """The model's own tensor, of the shard's shape."""
        return self._tensors[held.chunk, held.name]

    def gradient(self, held: HeldParameter) -> Tensor:
        """The fp32 gradient of the last backward pass, of the shard's shape; zeros for a buffer, which has no gradient."""
        tensor = self.tensor(held)
        if isinstance(tensor, torch.nn.Parameter):
            return megatron_attributes(tensor).main_grad
        return torch.zeros_like(tensor, dtype=torch.float32)

    def trained(self) -> list[tuple[HeldParameter, Tensor]]:
        """What an optimizer updates: a tied copy follows its original."""
        return [(held, tensor) for held, tensor in self if not held.is_tied_copy]

    def names(self) -> dict[torch.nn.Parameter, str]:
        """Global names of the parameters; buffers are left out."""
        return {tensor: held.parameter.name for held, tensor in self if isinstance(tensor, torch.nn.Parameter)}

    def modules(self, chunks: Sequence[GPTModel], names: Container[str]) -> list[torch.nn.Module]:
        """The modules that own the parameters of these global names."""
        return [
            chunks[held.chunk].get_submodule(held.name.rpartition(".")[0]) for held in self.held if held.parameter.name in names
        ]

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of each Hugging Face tensor into the model."""
        for held, tensor in self:
            tensor.copy_(held.shard_from_hf(weights))

    def snapshot(self) -> Weights:
        """A copy of the current values on the host."""
        return {(held.chunk, held.name): tensor.detach().cpu().clone() for held, tensor in self}

    @torch.no_grad()
    def swap(self, weights: Weights) -> None:
        """Exchange the model's values and `weights` in place, one tensor at a time: the device needs no second copy."""
        for key, parameter in self._tensors.items():
            current = parameter.cpu().clone()
            parameter.copy_(weights[key])
            weights[key].copy_(current)
