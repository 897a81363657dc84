"""Which attention `run.deterministic` leaves to a GPU, and what is refused: Transformer Engine 2.20.2 chooses one silently.

Its choice (`get_attention_backend`), for packed sequences in training, with s the longest of a microbatch:

    cuDNN's fused     not before compute capability 9.0; on 9.0 only while sequences x heads x s^2 < 2^30, as its workspace
                      grows with that; never with sinks
    flash-attn        where it is installed (2.4.1 to 2.8.3); never with sinks
    unfused           otherwise: it holds sequences x heads x s^2 scores, several times

The last is right, and ends a run with "out of memory" at the first microbatch that is unlucky. So the largest microbatch that the
configuration allows is looked at before anything is trained.
"""

import importlib.metadata
import re

from megatron_rl.batching import alignment_of
from megatron_rl.config import Config
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.weight_mapping import ModelArchitecture
from megatron_rl.weight_mapping.architecture import GroupedQueryAttention

MAX_SCORES = 1 << 30
"""sequences x heads x s^2 from which on Transformer Engine refuses cuDNN on compute capability 9.0."""

FIRST_FLASH_ATTENTION, AFTER_LAST_FLASH_ATTENTION = (2, 4, 1), (2, 8, 4)
"""Versions that Transformer Engine takes for a deterministic backward pass."""

SHORTEST_SEQUENCE = 2
"""A token of a prompt and one of its completion."""


def check_deterministic_attention(
    config: Config, model: ModelArchitecture, capability: tuple[int, int], *, has_flash_attention: bool
) -> None:
    """Refuse a run whose largest microbatch would be left to unfused attention.

    Args:
        config: Of the run, on GPUs.
        model: What is trained.
        capability: Compute capability of the GPUs, such as (9, 0).
        has_flash_attention: Whether flash-attn is installed, in a version that Transformer Engine takes.

    Raises:
        UnsupportedModelError: It would; says how large the microbatch can be and what to change.
    """
    if not config.run.deterministic:
        return
    sinks = isinstance(model.attention, GroupedQueryAttention) and model.attention.sinks
    scores = largest_scores(config, model)
    if sinks:
        if scores < MAX_SCORES:
            return
        reason, remedy = "for a model with attention sinks Transformer Engine has neither cuDNN's nor flash-attn's", ""
    else:
        has_cudnn = capability > (9, 0) or (capability == (9, 0) and scores < MAX_SCORES)
        if has_cudnn or has_flash_attention or scores < MAX_SCORES:
            return
        at = "at this size " if capability == (9, 0) else ""
        reason = f"on compute capability {capability[0]}.{capability[1]} Transformer Engine {at}has none of cuDNN's"
        remedy = "install flash-attn (bash scripts/setup.sh --gpu --flash-attn), or "
    raise UnsupportedModelError(
        f"run.deterministic = true: {reason} deterministic attention, and unfused attention has up to {scores / MAX_SCORES:.3g} "
        "x 2^30 scores in each layer, of which less than 1 x 2^30 are allowed. That is one sequence of "
        f"model.max_sequence_length = {config.model.max_sequence_length} among short ones, together "
        f"trainer.max_tokens_per_microbatch = {config.trainer.max_tokens_per_microbatch}: {remedy}lower one of the two, raise "
        "layout.tensor, or set run.deterministic = false"
    )


def largest_scores(config: Config, model: ModelArchitecture) -> int:
    """Bound of sequences x heads x s^2 of a rank, over all microbatches that the configuration allows.

    A long sequence among many short ones is the worst; padding at the end counts as a sequence of its own.
    """
    longest, most = config.model.max_sequence_length, config.trainer.max_tokens_per_microbatch
    alignment = alignment_of(config.parallel_layout, config.sequence_parallel)
    heads = -(-model.attention.num_heads // config.parallel_layout.tp)
    own = 2 if alignment.total > 1 else 1

    def scores(s: int) -> int:
        return (own + (most - s) // SHORTEST_SEQUENCE) * heads * alignment.padded(s) ** 2

    # (own + (most - s) / 2) x s^2 rises up to this s, and falls from there on; rounding and padding move it by a few.
    near = 2 + 2 * alignment.segment
    worst = min(longest, 2 * (most + SHORTEST_SEQUENCE * own) // 3)
    return max(scores(s) for s in range(max(1, worst - near), min(longest, most, worst + near) + 1))


def has_flash_attention() -> bool:
    """Whether flash-attn is installed in a version that Transformer Engine takes; it is not imported."""
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return FIRST_FLASH_ATTENTION <= numbers < AFTER_LAST_FLASH_ATTENTION
