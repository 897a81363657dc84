"""The quantisers of native fp4 training: what Transformer Engine's modules multiply are the values that the servers hold.

native_fp4.py says how Megatron comes to them. Each module asks for one quantiser of its input, of its weight and of its output's
gradient:

    forward     weight and input in NVFP4: blocks of 1 x 16, to the nearest value, without a Hadamard transform. The global scale
                is given, not measured: a weight's is that of its group (what servers fuse shares one), the input's is that of
                precision.activation_amax.
    backward    with respect to the values that the forward pass multiplied, straight through to weight and input:
                "full": both products in the model's dtype, with these values dequantised;
                "nvfp4": both in NVFP4, as in Transformer Engine's own recipe: the values quantised again along the other
                dimension, gradients rounded stochastically, Hadamard transforms for the gradient of the weight.

Transformer Engine's own recipe, NVFP4BlockScaling, cannot do this: it measures the global scale of each tensor by itself, on the
shard of one rank. This module imports Transformer Engine, and is imported only where it is installed.
"""

from functools import cache
from typing import Any

import torch
import transformer_engine_torch as native
from torch import Tensor
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.custom_recipes.quantizer_factories import nvfp4_factory
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from megatron_rl.precision import BLOCK, Nvfp4, QuantisationError, dequantise, encoding_scale, quantise

_DATA = ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise")
"""What an NVFP4 tensor of Transformer Engine holds of its rows."""


def plain_quantiser() -> NVFP4Quantizer:
    """Transformer Engine's own, for rows: blocks of 1 x 16, to the nearest value, no transform."""
    return NVFP4Quantizer(
        columnwise=False, with_rht=False, with_post_rht_amax=False, with_2d_quantization=False,
        stochastic_rounding=False, row_scaled_nvfp4=False, nvfp4_use_4over6=False,
    )  # fmt: skip


class GivenAmaxQuantizer(Quantizer):
    """Rows in NVFP4 with a given global scale.

    Args:
        amax: Largest magnitude that the scale represents. None: the attribute `nvfp4_amax` of the tensor, a parameter.
    """

    with_amax_reduction = False
    """Set by Transformer Engine where the input is gathered over the tensor-parallel ranks, see InputQuantizer."""
    amax_reduction_group: Any = None

    def __init__(self, amax: float | None) -> None:
        super().__init__(rowwise=True, columnwise=False)
        self._amax, self._native = amax, plain_quantiser()

    def copy(self) -> "GivenAmaxQuantizer":
        """Another of the same; Transformer Engine changes a quantiser's flags in place."""
        other = GivenAmaxQuantizer(self._amax)
        other.rowwise_usage, other.columnwise_usage, other.internal = self.rowwise_usage, self.columnwise_usage, self.internal
        return other

    def quantize_impl(self, tensor: Tensor) -> Any:
        """An NVFP4 tensor of Transformer Engine, [..., inputs]."""
        # A copy: the result keeps this very tensor, and a module empties all tensors of an input that it is done with.
        amax = self._amax_of(tensor).clone()
        return native.nvfp4_quantize_with_amax(tensor, self._native, amax, amax)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Quantise into the tensor that a module keeps of its weight for all microbatches of a step."""
        assert noop_flag is None, "only CUDA graphs skip an update, and they are not used"
        new = self.quantize_impl(src)
        for name in _DATA:
            setattr(dst, name, getattr(new, name))
        return dst

    def is_requantization_safe(self) -> bool:
        """The same tensor gives the same bytes."""
        return True

    def _get_compatible_recipe(self) -> type[CustomRecipe]:
        return CustomRecipe

    def _amax_of(self, tensor: Tensor) -> Tensor:
        if self._amax is not None:
            return _constant(self._amax, tensor.device)
        amax = getattr(tensor, "nvfp4_amax", None)
        if amax is None:
            raise QuantisationError(
                f"a weight of shape {tuple(tensor.shape)} has no global scale: this pass is not one of the trainer's own, or the "
                "weight's module should have been left in full precision"
            )
        return amax


class InputQuantizer(HybridQuantizer):
    """Quantises the input of a module once, also where sequence parallelism cuts it over the tensor-parallel ranks.

    There Transformer Engine quantises a rank's own part, dequantises it, gathers these values and quantises them again, to other
    values where the scale of a block is a subnormal number. What is gathered is therefore the part as it was. In a forward pass
    it takes the place of the columns, which are saved for the backward pass and only read to be gathered again.
    """

    def copy(self) -> "InputQuantizer":
        """Another of the same, as Transformer Engine attaches one to each result."""
        other = InputQuantizer(
            rowwise_quantizer=self.rowwise_quantizer.copy(),
            columnwise_quantizer=self.columnwise_quantizer.copy(),
            columnwise_source=self.columnwise_source,
        )
        other.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        other.internal, other.optimize_for_gemm = self.internal, self.optimize_for_gemm
        return other

    def quantize_impl(self, tensor: Tensor) -> Any:
        """A hybrid tensor of Transformer Engine, [..., inputs]."""
        result = super().quantize_impl(tensor)
        if self.with_amax_reduction:
            unrounded = IdentityQuantizer(rowwise=False).quantize(tensor)
            if self.rowwise_usage and self.columnwise_usage:
                result._columnwise_storage = unrounded  # noqa: SLF001 (no public way to give it)
            result.dequantize = unrounded.dequantize  # what the gathering sends
        return result


def quantiser_for(tensor_type: str, activation_amax: float, backward: str) -> Quantizer:
    """The quantiser of one tensor of a module.

    Args:
        tensor_type: "input", "weight" or "grad_output"; "" where a module's output could leave it quantised.
        activation_amax: See precision.activation_amax.
        backward: See precision.backward, and the text of this module.
    """
    in_fp4 = backward == "nvfp4"
    if tensor_type == "weight":
        rows, columns = GivenAmaxQuantizer(None), plain_quantiser() if in_fp4 else IdentityQuantizer()
        return HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns, columnwise_source="rowwise_dequantized")
    if tensor_type == "input":
        rows, columns = GivenAmaxQuantizer(activation_amax), nvfp4_factory(_INPUT) if in_fp4 else IdentityQuantizer()
        return InputQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns, columnwise_source="rowwise_dequantized")
    if tensor_type == "grad_output" and in_fp4:
        return nvfp4_factory(_GRADIENT)
    return IdentityQuantizer()


class TransformerEngineQuantiser:
    """Quantises weights in bf16 by Transformer Engine's kernel; what it does not take, by this project's functions."""

    name = "Transformer Engine"

    def __init__(self) -> None:
        self._native = plain_quantiser()

    def quantise(self, matrix: Tensor, amax: Tensor) -> Nvfp4:
        """See nvfp4.quantise."""
        rows, inputs = matrix.shape
        if matrix.dtype is not torch.bfloat16 or rows % BLOCK or inputs % BLOCK:
            return quantise(matrix, amax)
        scale = amax.reshape(1).to(torch.float32, copy=True)
        found = native.nvfp4_quantize_with_amax(matrix.contiguous(), self._native, scale, scale)
        scales = found._rowwise_scale_inv[:rows, : inputs // BLOCK].contiguous()  # noqa: SLF001 (as Megatron reads it)
        encoding = encoding_scale(amax)
        return Nvfp4(found._rowwise_data, scales.view(torch.float8_e4m3fn), torch.div(torch.ones_like(encoding), encoding))  # noqa: SLF001

    def fake_quantise(self, matrix: Tensor, amax: Tensor) -> Tensor:
        """See nvfp4.fake_quantise."""
        return dequantise(self.quantise(matrix, amax), matrix.dtype)


_INPUT, _GRADIENT = (QuantizerRole(module_type="linear", tensor_type=name) for name in ("input", "grad_output"))


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)
