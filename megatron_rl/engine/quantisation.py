"""NVFP4 in the trainer: passes use the values that the servers hold, in place of the weights.

The weights themselves stay what the optimizer updates and checkpoints keep. During passes each quantised parameter points at its
NVFP4 values instead, whatever module it belongs to; gradients are those with respect to these values and go straight through to
the weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.sections import Precision
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.weight_export import WeightExport
from megatron_rl.precision import (
    CheckpointFormat,
    QuantisationError,
    Selection,
    amax_of,
    check_cuts,
    fake_quantise,
    quantised_stream,
)
from megatron_rl.weight_mapping import HeldParameter
from megatron_rl.wire.tensor_spec import TensorSpec


class PolicyQuantiser:
    """One rank's quantised parameters. Values are computed once for each state of the weights, however many passes use them.

    The global scales are those of full matrices at any layout: computing them is a collective of all ranks.

    Args:
        selection: Which parameters are quantised.
        parameters: Those that this rank holds, with their tensors.
        device: Device of the tensors.

    Raises:
        QuantisationError: The layout cuts a matrix within a block of NVFP4.
    """

    def __init__(self, selection: Selection, parameters: Iterable[tuple[HeldParameter, Tensor]], device: torch.device) -> None:
        self.selection = selection
        number: dict[str | None, int] = {group: place for place, group in enumerate(selection.groups)}
        chosen = [(held, tensor) for held, tensor in parameters if held.parameter.name in selection.names]
        check_cuts(held for held, _ in chosen)
        self._tensors = [(number[held.parameter.quantisation_group], tensor) for held, tensor in chosen]
        self._device = device
        self._amaxes: Tensor | None = None
        self._values: list[Tensor] | None = None

    def weights_changed(self) -> None:
        """Drop what was computed from the former weights."""
        self._amaxes = self._values = None

    def amaxes(self) -> dict[str, Tensor]:
        """The largest |x| of each group, f32 []; a collective.

        Raises:
            QuantisationError: Names the groups where it is not finite.
        """
        return dict(zip(self.selection.groups, self._over_ranks().unbind(), strict=True))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block passes use NVFP4 values; a collective."""
        if self._values is None:
            amaxes = self._over_ranks()
            self._values = [fake_quantise(tensor.data, amaxes[group]) for group, tensor in self._tensors]
        weights = [tensor.data for _, tensor in self._tensors]
        self._point_at(self._values)
        try:
            yield
        finally:
            self._point_at(weights)

    def _point_at(self, data: list[Tensor]) -> None:
        for (_, tensor), new in zip(self._tensors, data, strict=True):
            tensor.data = new

    def _over_ranks(self) -> Tensor:
        """[groups]: every rank has them all, also those of other stages and experts."""
        if self._amaxes is None:
            found = torch.zeros(len(self.selection.groups), device=self._device)
            for group, tensor in self._tensors:
                found[group] = torch.maximum(found[group], amax_of(tensor.data))
            # A maximum over ranks may lose a NaN; infinity stays.
            found.masked_fill_(found.isnan(), torch.inf)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            bad = [group for group, fine in zip(self.selection.groups, found.isfinite().tolist(), strict=True) if not fine]
            if bad:
                raise QuantisationError(f"weights that are not finite have no NVFP4 form: {', '.join(bad[:8])}")
            self._amaxes = found
        return self._amaxes


class Nvfp4WeightExport:
    """The policy under Hugging Face names as WeightExport gives it, with quantised matrices as the tensors of a format.

    Iterating is a collective. Matrices are quantised as they pass, from the full matrices: to the same bits as in the ranks'
    passes.

    Args:
        tensors: The policy.
        quantiser: Quantiser of the same parameters.
        stored_as: The format.
    """

    def __init__(self, tensors: WeightExport, quantiser: PolicyQuantiser, stored_as: CheckpointFormat) -> None:
        self._tensors, self._quantiser, self._stored_as = tensors, quantiser, stored_as

    @property
    def specs(self) -> list[TensorSpec]:
        """Known on every rank, without communication."""
        quantised = self._quantiser.selection.group_of
        return [
            stored
            for spec in self._tensors.specs
            for stored in (self._stored_as.specs(spec.name, spec.shape) if spec.name in quantised else [spec])
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from quantised_stream(self._tensors, self._quantiser.selection.group_of, self._quantiser.amaxes(), self._stored_as)


class _StraightThrough(torch.autograd.Function):
    """Activations [..., inputs] through NVFP4; the gradient as if nothing had been done."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, amax: Tensor) -> Tensor:
        return fake_quantise(activations.flatten(0, -2), amax).view_as(activations)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def check_input_quantisation(*, has_transformer_engine: bool) -> None:
    """Raise UnsupportedModelError where the input of a linear layer cannot be quantised."""
    if has_transformer_engine:
        raise UnsupportedModelError(
            "precision.activations = 'nvfp4': Transformer Engine's linear layers start with a fused norm, before which nothing "
            "can be quantised; train with precision.training = 'native', or leave precision.activations at full precision"
        )


def quantise_inputs(modules: Iterable[torch.nn.Module], amax: float, device: torch.device) -> None:
    """Make linear layers multiply NVFP4 activations.

    The global scale is a constant: it depends neither on how tokens are cut into microbatches nor on the layout, and servers have
    one that was fixed beforehand as well.

    Args:
        modules: The linear layers.
        amax: Largest activation that the scale represents.
        device: Device of the activations.
    """
    limit = torch.tensor(amax, device=device)
    for module in modules:
        module.register_forward_pre_hook(partial(_with_quantised_input, limit))


def _with_quantised_input(limit: Tensor, _module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_StraightThrough.apply(inputs[0], limit), *inputs[1:])


def native_fp4_settings(section: Precision, has_transformer_engine: bool) -> Mapping[str, Any]:
    """Arguments of TransformerConfig for training in fp4.

    Args:
        section: The run's precision section.
        has_transformer_engine: Whether the layers are Transformer Engine's.

    Raises:
        UnsupportedModelError: Where Megatron would silently train in bf16.
    """
    if section.training != "native":
        return {}
    if not has_transformer_engine:
        raise UnsupportedModelError(
            "precision.training = 'native' needs a Blackwell GPU and Transformer Engine, and this machine does not have both: "
            "without them Megatron would train in bf16; install megatron-rl[gpu] on such a machine, or use 'qat'"
        )
    from transformer_engine.common import recipe

    capability = torch.cuda.get_device_capability()
    if capability < (10, 0) or not hasattr(recipe, "NVFP4BlockScaling"):
        raise UnsupportedModelError(
            "precision.training = 'native' needs a GPU of compute capability 10.0 or above "
            f"(this one has {capability[0]}.{capability[1]}) and a Transformer Engine with the NVFP4BlockScaling recipe "
            "(2.7 or later); use 'qat'"
        )
    return {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
