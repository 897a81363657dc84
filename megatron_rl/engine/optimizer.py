"""AdamW through Megatron's distributed optimizer, Muon within it where it is asked for, and the rates of a step."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from megatron_rl.config import Config
from megatron_rl.config.sections import Optimizer
from megatron_rl.optim import MuonRates


class NonFiniteGradientError(RuntimeError):
    """A step's gradients hold NaN or infinity: the step is not made, and the message names it and the parameters."""


def learning_rate(section: Optimizer, step: int, total_steps: int) -> float:
    """Of step number `step` (from 0) of `total_steps`: a linear warm-up, then the decay down to the minimum at the last step.

    A function of the step alone: a resumed run needs no state for it, and cannot take a step of the schedule twice.
    """
    peak, low, warmup = section.learning_rate, section.min_learning_rate, section.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if section.decay == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    share = 1.0 - progress if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return low + (peak - low) * share


def build_optimizer(config: Config, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """fp32 master weights and moments, cut over the data-parallel ranks. The rates are set anew before each step."""
    section, dtype = config.optimizer, getattr(torch, config.model.dtype)
    settings = OptimizerConfig(
        optimizer="adam", lr=section.learning_rate, min_lr=section.min_learning_rate, weight_decay=section.weight_decay,
        adam_beta1=section.beta1, adam_beta2=section.beta2, adam_eps=section.epsilon, clip_grad=section.max_grad_norm,
        params_dtype=dtype, bf16=dtype is torch.bfloat16, use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, list(chunks))
    for part in inner_optimizers(optimizer):
        # A fused optimizer is loaded without states as well, but not with some of them.
        if isinstance(part, torch.optim.AdamW) or section.name == "muon":
            _make_states(part)
    return optimizer


def _make_states(part: torch.optim.Optimizer) -> None:
    """PyTorch's AdamW makes its moments at the first step; Megatron can neither save nor load an optimizer without them."""
    for parameter in (parameter for group in part.param_groups for parameter in group["params"]):
        state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        step = {"step": torch.zeros((), dtype=torch.float32)} if isinstance(part, torch.optim.AdamW) else {}
        part.state[parameter] = step | state


def align_step_counts(optimizer: MegatronOptimizer) -> None:
    """Before saving and loading, a collective: a part of the optimizer that has no parameter on this rank (a stage without
    experts) gets the others' step count. Megatron asks each part for exactly one, and writes the first rank's."""
    inner = _torch_optimizers(optimizer)
    if not inner:
        return
    count = torch.stack([torch.zeros(()), *(state["step"] for part in inner for state in part.state.values())]).max()
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    for part in inner:
        if not any(group["params"] for group in part.param_groups):
            part.state["of no parameter"] = {"step": count.clone()}


def separate_step_counts(optimizer: MegatronOptimizer) -> None:
    """After loading: Megatron hands the same count, one tensor, to all parameters, and AdamW would raise it once for each of
    them."""
    for part in _torch_optimizers(optimizer):
        for state in part.state.values():
            state["step"] = state["step"].clone()


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """What Megatron wraps: one for the dense parameters, one for experts."""
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [part for part in parts if part is not None]


def _torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    """The PyTorch optimizers inside; none where Transformer Engine or apex brings a fused one."""
    return [part for part in inner_optimizers(optimizer) if isinstance(part, torch.optim.AdamW)]


def muon_rates(section: Optimizer, rate: float) -> MuonRates:
    """Of a step in which AdamW's rate is `rate`: Muon's follows the same schedule."""
    own, decay = section.muon.learning_rate, section.muon.weight_decay
    return MuonRates(
        learning_rate=rate if own is None else rate * own / section.learning_rate,
        weight_decay=section.weight_decay if decay is None else decay,
    )


def set_rates(optimizer: MegatronOptimizer, rate: float, weight_decay: float) -> None:
    """Norms and other vectors are not decayed: Megatron marks their groups with a multiplier of 0."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def check_gradients(chunks: Sequence[DistributedDataParallel], names: Sequence[dict[torch.nn.Parameter, str]], step: int) -> None:
    """NonFiniteGradientError on all ranks if any of them holds a gradient that is not finite; after the gradients are reduced.

    names: of each chunk, the parameters' global names. Megatron would go on with NaN weights (bf16, fp32), or skip the step.
    """
    # A sum that overflows is worth the exact look as well.
    sums = [buffer.grad_data.sum() for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    suspect = torch.stack([~torch.isfinite(value) for value in sums]).any().float()
    dist.all_reduce(suspect, op=dist.ReduceOp.MAX)
    if not suspect:
        return
    found = [name for known in names for parameter, name in known.items() if not torch.isfinite(parameter.main_grad).all()]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, found)
    bad = sorted({name for part in everywhere for name in part})
    if bad:
        shown = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        raise NonFiniteGradientError(
            f"step {step}: gradients that are not finite in {shown}; the step is not made, the weights are as before"
        )
