"""Random inputs for the tests of the keep-set operation: all kinds of tokens, sets of all widths, padded rows with huge
logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.keep_set import KeepSets, TokenKind, reference_log_probs

# fp32: a dot product of H <= 64 terms in another order, over logits of order 10, then exp. bf16: the inputs are the same bf16
# numbers in the float64 reference and products of bf16 are exact in fp32, so values agree as in fp32; gradients are rounded to
# bf16 (2^-9) once.
VALUE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5}
GRADIENT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 8e-3}


@dataclass
class Case:
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V_padded, H]
    keep_sets: KeepSets
    temperature: float | Tensor
    vocab_size: int
    upstream: Tensor  # [T], gradient of the log-probs
    upstream_entropy: Tensor  # [T]


def make_sets(
    num_tokens: int, vocab_size: int, sizes: list[int], generator: torch.Generator, *, unscored=0.15, full=0.0
) -> KeepSets:
    """Sets of random ids in random order, the size of each drawn from `sizes`; shares of tokens without value and without
    truncation."""
    draw = torch.rand(num_tokens, generator=generator)
    kinds = torch.full((num_tokens,), int(TokenKind.KEEP_SET), dtype=torch.uint8)
    kinds[draw < unscored + full] = TokenKind.FULL
    kinds[draw < unscored] = TokenKind.UNSCORED
    chosen = torch.tensor(sizes)[torch.randint(len(sizes), (num_tokens,), generator=generator)] * (kinds == TokenKind.KEEP_SET)
    kept = [torch.randperm(vocab_size, generator=generator)[:size] for size in chosen.tolist()]
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    for t, ids in enumerate(kept):
        if len(ids):
            targets[t] = ids[int(torch.randint(len(ids), (1,), generator=generator))]
    offsets = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
    return KeepSets(targets, kinds, torch.cat([torch.empty(0, dtype=torch.int64), *kept]).int(), offsets)


def make_case(
    seed=0, *, num_tokens=24, vocab_size=50, num_rows=56, width=16, dtype=torch.float32, sizes=(1, 1, 2, 3, 5), **kinds
) -> Case:
    """num_rows: vocabulary rows with padding; the padding rows' logits would swallow everything if they took part."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    weight[vocab_size:] = 1e4
    return Case(
        hidden=hidden,
        weight=weight.to(dtype),
        keep_sets=make_sets(num_tokens, vocab_size, list(sizes), generator, **kinds),
        temperature=0.5 + torch.rand(num_tokens, generator=generator),
        vocab_size=vocab_size,
        upstream=torch.randn(num_tokens, generator=generator),
        upstream_entropy=torch.randn(num_tokens, generator=generator),
    )


def reference(case: Case, *, with_entropy: bool) -> dict[str, Tensor]:
    """Values and gradients, float64, of the whole case in one process."""
    hidden, weight = (tensor.double().requires_grad_() for tensor in (case.hidden, case.weight))
    log_probs, entropy = reference_log_probs(
        hidden, weight, case.keep_sets, temperature=case.temperature, vocab_size=case.vocab_size
    )
    loss = (log_probs * case.upstream).sum() + with_entropy * (entropy * case.upstream_entropy).sum()
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "d_hidden": d_hidden, "d_weight": d_weight}


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted magnitude (or 1, if that is smaller)."""
    got, wanted = got.double().cpu(), wanted.double().cpu()
    assert got.shape == wanted.shape and bool(got.isfinite().all())
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)) if got.numel() else 0.0
