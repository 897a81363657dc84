"""Transformer Engine's layers against the same sums in float64 on the CPU. Skipped without a GPU or without the library.

The three modules that Megatron-Core builds a MoE layer of. Not shown: FP4, and what Megatron-Core adds around them.
"""

import math

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
te = pytest.importorskip("transformer_engine.pytorch") if torch.cuda.is_available() else None

# Of the largest magnitude. fp32 as the trainer has it on a GPU, without TF32; bf16 rounds inputs of the products to 2^-9.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTHS = (5, 64, 17)


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype).requires_grad_()


def compare(report, what: str, dtype: torch.dtype, given: list[torch.Tensor], found: torch.Tensor, expected) -> None:
    """Output, and gradients of all that is given, against `expected` of float64 copies."""
    copies = [tensor.detach().double().cpu().requires_grad_() for tensor in given]
    wanted = expected(*copies)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    gradients = torch.autograd.grad(found.reshape(wanted.shape), given, upstream.cuda())
    exact = torch.autograd.grad(wanted, copies, upstream.double())
    for one, other in zip((found.reshape(wanted.shape), *gradients), (wanted, *exact), strict=True):
        error = ((one.double().cpu() - other).abs().max() / other.abs().max()).item()
        report(**{f"{what}, {str(dtype).removeprefix('torch.')}": error})
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_and_projection(dtype, report):
    layer = te.LayerNormLinear(64, 96, eps=1e-6, bias=False, normalization="RMSNorm", params_dtype=dtype)
    x = random(48, 64, dtype=dtype, seed=1)

    def expected(x, scale, weight):
        return (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale) @ weight.T

    compare(report, "norm and projection", dtype, [x, layer.layer_norm_weight, layer.weight], layer(x), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_grouped_experts(dtype, report):
    counts = [7, 0, 25]
    layer = te.GroupedLinear(len(counts), 64, 32, bias=False, params_dtype=dtype)
    weights = [getattr(layer, f"weight{i}") for i in range(len(counts))]
    x = random(sum(counts), 64, dtype=dtype, seed=2)

    def expected(x, *weights):
        return torch.cat([part @ weight.T for part, weight in zip(x.split(counts), weights, strict=True)])

    compare(report, "grouped experts", dtype, [x, *weights], layer(x, counts), expected)


def test_packed_causal_attention(report):
    """Grouped queries, sequences one behind the other; in bf16, the only dtype that fused attention takes."""
    heads, groups, width, dtype = 4, 2, 64, torch.bfloat16
    layer = te.DotProductAttention(
        heads, width, num_gqa_groups=groups, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=0.0
    )
    q, k, v = (random(sum(LENGTHS), n, width, dtype=dtype, seed=3 + n) for n in (heads, groups, groups))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    longest = max(LENGTHS)
    found = layer(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)

    def expected(q, k, v):
        parts = []
        for one, keys, values in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True):
            each_key, each_value = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in (keys, values))
            scores = torch.einsum("shd,thd->hst", one, each_key) / math.sqrt(width)
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            shares = scores.masked_fill(future, -math.inf).softmax(-1)
            parts.append(torch.einsum("hst,thd->shd", shares, each_value).flatten(1))
        return torch.cat(parts)

    compare(report, "packed attention", dtype, [q, k, v], found, expected)
