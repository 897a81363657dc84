"""A stand-in on a CPU for the functions of Transformer Engine's native extension that its linear layers call.

Quantising is that of Transformer Engine's pure-torch reference; products, dequantising and the norm are a few lines of torch. The
Python of the library is as in the wheel: which tensor it quantises when, what it keeps, which operands a product gets.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NORM_EPSILON = 1e-5
PRODUCTS: list[tuple[str, str]] = []
"""Each product that was computed: operands in "fp4" or in "full" precision, and which are transposed, as the library says it."""


def install() -> None:
    """Put the stand-ins into the imported library, and let it believe that it is on a Blackwell GPU."""
    import transformer_engine.pytorch.cpp_extensions as reexported
    import transformer_engine.pytorch.cpp_extensions.gemm as products
    import transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage as storage
    import transformer_engine_torch as native
    from transformer_engine.pytorch.constants import TE_DType

    for function in (nvfp4_quantize_with_amax, generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd):
        setattr(native, function.__name__, function)
        setattr(reexported, function.__name__, function)
    for name in ("layernorm_fwd", "layernorm_bwd"):
        setattr(reexported, name, None)
    storage._FromNVFP4Func.forward = staticmethod(lambda _, tensor, dtype: dequantized(tensor, dtype))
    products.get_cublas_workspace = lambda device, ub, grouped: [torch.empty(1)] if grouped else torch.empty(1)
    _DTYPES.update({int(value): dtype for dtype, value in TE_DType.items()})
    answers = {
        "is_available": True,
        "current_device": torch.device("cpu"),
        "get_device_capability": (10, 0),
        "is_current_stream_capturing": False,
        "get_device_properties": SimpleNamespace(major=10, minor=0, multi_processor_count=1),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.Tensor.cuda = lambda self, *_, **__: self


_DTYPES: dict[int, torch.dtype] = {}


def nvfp4_quantize_with_amax(tensor: Tensor, quantizer: Any, rowwise_amax: Tensor, columnwise_amax: Tensor) -> Any:
    """Rows, by the reference quantiser; scales padded as the library has them."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor

    assert type(quantizer) is NVFP4Quantizer, "the extension knows no subclass"
    assert quantizer.rowwise_usage
    assert not quantizer.columnwise_usage
    assert not (quantizer.with_rht)
    assert not (quantizer.with_2d_quantization)
    assert not (quantizer.stochastic_rounding)
    assert rowwise_amax.dtype is columnwise_amax.dtype is torch.float32
    assert rowwise_amax.numel() == columnwise_amax.numel() == 1
    matrix = tensor.detach().contiguous().view(-1, tensor.shape[-1])
    rows, inputs = matrix.shape
    if rows % 16 or inputs % 16:
        raise ValueError(f"NVFP4 requires tensor dims that are divisible by 16, not {rows} x {inputs}")
    packed, scales = torch.empty(0, inputs // 2, dtype=torch.uint8), torch.empty(0, inputs // 16, dtype=torch.float8_e4m3fn)
    if rows:
        packed, scales = NVFP4QuantizerRef._quantize_blockwise_reference(matrix, rowwise_amax, 16, 1, pow_2_scales=False, eps=0.0)
    padded = torch.zeros(math.ceil(rows / 128) * 128, math.ceil(inputs / 64) * 4, dtype=torch.uint8)
    padded[:rows, : inputs // 16] = scales.view(torch.uint8)
    return NVFP4Tensor(
        shape=tensor.shape, dtype=tensor.dtype, fp4_dtype=quantizer.dtype, quantizer=quantizer, with_gemm_swizzled_scales=False,
        rowwise_data=packed.view(*tensor.shape[:-1], inputs // 2), rowwise_scale_inv=padded, amax_rowwise=rowwise_amax,
        columnwise_data=None, columnwise_scale_inv=None, amax_columnwise=None,
    )  # fmt: skip


def _scaled_rows(tensor: Any, factor: Tensor | float) -> Tensor:
    """E2M1 values times block scales times a factor, fp32 [rows, inputs]."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

    packed = tensor._rowwise_data.reshape(-1, tensor._rowwise_data.shape[-1])
    rows, blocks = packed.shape[0], packed.shape[1] // 8
    scales = tensor._rowwise_scale_inv.view(torch.float8_e4m3fn)[:rows, :blocks].float() * factor
    return (cast_from_fp4x2(packed, torch.float32).view(rows, blocks, 16) * scales.unsqueeze(-1)).flatten(1)


def dequantized(tensor: Any, dtype: torch.dtype) -> Tensor:
    """As the library's kernel multiplies: the block's scale times amax times 1 / 2688, then the value."""
    rows = _scaled_rows(tensor, tensor._amax_rowwise * torch.tensor(1 / 2688))
    return rows.view(*tensor._rowwise_data.shape[:-1], -1).to(dtype)


def _operand(tensor: Any, *, by_rows: bool) -> tuple[Tensor, Tensor | None]:
    """fp32 [rows, columns], and the amax of an FP4 operand, which products apply at the end."""
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    if isinstance(tensor, NVFP4TensorStorage):
        assert by_rows, "the stand-in has no columns in FP4"
        return _scaled_rows(tensor, 1.0), tensor._amax_rowwise
    assert isinstance(tensor, Tensor), f"a product of {type(tensor).__name__}"
    return tensor.reshape(-1, tensor.shape[-1]).float(), None


def _product(first: Any, transa: bool, second: Any, transb: bool, out: Tensor | None, dtype: torch.dtype, add: bool) -> Tensor:
    (a, amax_a), (b, amax_b) = _operand(first, by_rows=transa), _operand(second, by_rows=not transb)
    assert (amax_a is None) == (amax_b is None), "an FP4 product has two FP4 operands"
    PRODUCTS.append(("full" if amax_a is None else "fp4", ("T" if transa else "N") + ("T" if transb else "N")))
    result = (b.t() if transb else b) @ (a.t() if transa else a)
    if amax_a is not None:
        result = result * (amax_a * amax_b / (2688.0 * 2688.0))
    if out is None:
        return result.to(dtype)
    return out.copy_(out + result if add else result)


def generic_gemm(
    first: Any, transa: bool, second: Any, transb: bool, out: Tensor | None, quantization_params: Any, out_dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, size: int, accumulate: bool, *_: Any, **__: Any,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """A product of two operands; layouts in the words of BLAS, where matrices are columns first."""
    assert quantization_params is None
    assert bias is None
    assert not gelu
    dtype = torch.bfloat16 if out_dtype is None else _DTYPES[int(out_dtype)]
    result = _product(first, transa, second, transb, out, dtype, accumulate)
    leading = () if transb else tuple(second.size())[:-1]
    return (result.view(*leading, result.shape[-1]) if leading else result), None, None, None


def te_general_grouped_gemm(
    first: list, transa: bool, second: list, transb: bool, out: list[Tensor], out_dtype: Any, splits: list[int], bias: Any,
    bias_dtype: Any, single_output: bool, gelu_in: Any, grad: bool, workspaces: Any, size: int, accumulate: bool, *_: Any,
) -> Any:  # fmt: skip
    """A product for each expert."""
    outputs = torch.split(out[0].view(-1, out[0].shape[-1]), splits) if single_output else out
    for a, b, output in zip(first, second, outputs, strict=True):
        if output.numel():
            _product(a, transa, b, transb, output, output.dtype, accumulate)
    return bias


def rms_norm(inputs: Tensor, weight: Tensor) -> Tensor:
    """In fp32, then in the dtype of the inputs."""
    values = inputs.float()
    return (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + NORM_EPSILON) * weight.float()).to(inputs.dtype)


def rmsnorm_fwd(
    inputs: Tensor, weight: Tensor, epsilon: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """The norm, which no quantiser is fused with."""
    assert quantizer is None
    assert epsilon == NORM_EPSILON
    assert not zero_centered
    return rms_norm(inputs, weight), None, torch.rsqrt(inputs.float().pow(2).mean(-1) + epsilon)


def rmsnorm_bwd(gradient: Tensor, inputs: Tensor, rsigma: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Gradients of inputs and weight."""
    with torch.enable_grad():
        leaves = inputs.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(rms_norm(*leaves), leaves, gradient.view_as(inputs))
