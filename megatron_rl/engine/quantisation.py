"""NVFP4 in the trainer: passes use the values that the servers hold, in place of the weights.

The weights themselves stay what the optimizer updates and checkpoints keep. With precision.training = "qat" each quantised
parameter points at its NVFP4 values during passes instead, whatever module it belongs to; gradients are those with respect to
these values and go straight through to the weights. Training = "native" is in native_fp4.py.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.weight_export import WeightExport
from megatron_rl.precision import (
    CheckpointFormat,
    MatrixQuantiser,
    QuantisationError,
    Selection,
    TorchQuantiser,
    amax_of,
    difference_of,
    fake_quantise,
    quantised_stream,
)
from megatron_rl.weight_mapping import HeldParameter
from megatron_rl.wire.tensor_spec import TensorSpec

logger = logging.getLogger(__name__)


FP4_CAPABILITY = (10, 0)
"""The first GPUs (Blackwell) with FP4 products, and with Transformer Engine's kernels for them."""


class PolicyQuantiser:
    """One rank's quantised parameters and their global scales, computed once for each state of the weights.

    The global scales are those of full matrices at any layout: computing them is a collective of all ranks. This class serves
    servers that quantise where the trainer does not; its passes use the weights themselves.

    Args:
        selection: Which parameters are quantised.
        parameters: Those that this rank holds, with their tensors.
        device: Device of the tensors.
    """

    def __init__(self, selection: Selection, parameters: Iterable[tuple[HeldParameter, Tensor]], device: torch.device) -> None:
        self.selection = selection
        number: dict[str | None, int] = {group: place for place, group in enumerate(selection.groups)}
        chosen = [(held, tensor) for held, tensor in parameters if held.parameter.name in selection.names]
        self._tensors = [(number[held.parameter.quantisation_group], tensor) for held, tensor in chosen]
        self._device = device
        self._amaxes: Tensor | None = None

    def weights_changed(self) -> None:
        """Drop what was computed from the former weights."""
        self._amaxes = None

    def passes(self) -> AbstractContextManager[None]:
        """What passes run in, so that they use what the policy multiplies; entering it is a collective."""
        return nullcontext()

    def amaxes(self) -> dict[str, Tensor]:
        """The largest |x| of each group, f32 []; a collective.

        Raises:
            QuantisationError: Names the groups where it is not finite.
        """
        return dict(zip(self.selection.groups, self._over_ranks().unbind(), strict=True))

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


class ValueQuantiser(PolicyQuantiser):
    """Passes use the NVFP4 values of the quantised parameters: precision.training = "qat".

    Args:
        selection: Which parameters are quantised.
        parameters: Those that this rank holds, with their tensors.
        device: Device of the tensors.
        kernel: What computes the values.
    """

    def __init__(
        self,
        selection: Selection,
        parameters: Iterable[tuple[HeldParameter, Tensor]],
        device: torch.device,
        kernel: MatrixQuantiser,
    ) -> None:
        super().__init__(selection, parameters, device)
        self._kernel = kernel
        self._values: list[Tensor] | None = None

    def weights_changed(self) -> None:
        """Drop what was computed from the former weights."""
        super().weights_changed()
        self._values = None

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Within the block the parameters are their values; entering it is a collective."""
        if self._values is None:
            amaxes = self._over_ranks()
            self._values = [self._kernel.fake_quantise(tensor.data, amaxes[group]) for group, tensor in self._tensors]
        weights = [tensor.data for _, tensor in self._tensors]
        self._point_at(self._values)
        try:
            yield
        finally:
            self._point_at(weights)

    def _point_at(self, data: list[Tensor]) -> None:
        for (_, tensor), new in zip(self._tensors, data, strict=True):
            tensor.data = new


def quantiser_of_values(device: torch.device, *, has_transformer_engine: bool) -> MatrixQuantiser:
    """Transformer Engine's FP4 kernel where it gives the servers' bytes, this project's own functions elsewhere.

    Args:
        device: Device of the weights.
        has_transformer_engine: Whether the layers are Transformer Engine's.
    """
    if not has_transformer_engine or torch.cuda.get_device_capability() < FP4_CAPABILITY:
        return TorchQuantiser()
    from megatron_rl.engine.te_fp4 import TransformerEngineQuantiser

    kernel = TransformerEngineQuantiser()
    if difference := difference_of(kernel, device):
        logger.warning(
            "weights are quantised by PyTorch: Transformer Engine's kernel gives other bytes than those that servers get (%s)",
            difference,
        )
        return TorchQuantiser()
    logger.info("weights are quantised by %s", kernel.name)
    return kernel


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
