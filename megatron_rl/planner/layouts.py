"""All layouts that divide a model over a number of ranks."""

from collections.abc import Iterator
from functools import cache

from megatron_rl.topology import Layout, LayoutError
from megatron_rl.weight_mapping import GroupedQueryAttention, ModelArchitecture

CONTEXT_FROM = 16384
"""Tokens of a sequence above which context parallelism is tried; shorter sequences are cheaper to shard in other ways."""
LONGEST_PIPELINE = 32
"""Most pipeline stages."""
MOST_CHUNKS = 4
"""Most virtual chunks of a stage."""


def divisors(number: int, most: int | None = None) -> list[int]:
    """Divisors of `number` up to `most`, in ascending order."""
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def candidate_layouts(model: ModelArchitecture, world_size: int, node: int, longest_sequence: int) -> Iterator[Layout]:
    """All layouts of the trainer that divide the model, without those that never pay off.

    Left out are tensor parallelism across nodes, context parallelism for short sequences, and expert-tensor parallelism where
    expert parallelism could use the ranks.

    Args:
        model: The model's architecture.
        world_size: Number of trainer ranks.
        node: Ranks of one node.
        longest_sequence: Tokens of the longest sequence.

    Returns:
        An iterator over the layouts.
    """
    cps = [1] if longest_sequence <= CONTEXT_FROM else [n for n in (1, 2, 4, 8, 16) if longest_sequence // n >= 4096]
    for tp in tensor_sizes(model, node):
        for cp in cps:
            for pp in divisors(world_size // (tp * cp), LONGEST_PIPELINE) if world_size % (tp * cp) == 0 else []:
                yield from _with_experts(model, world_size, tp, cp, pp)


def tensor_sizes(model: ModelArchitecture, node: int) -> list[int]:
    """Tensor-parallel sizes up to `node` ranks that divide the heads, query groups and hidden size."""
    a = model.attention
    sizes = [n for n in divisors(a.num_heads, node) if model.hidden_size % n == 0]
    if isinstance(a, GroupedQueryAttention):
        sizes = [n for n in sizes if a.num_query_groups % n == 0 or n % a.num_query_groups == 0]
    return sizes


def _with_experts(model: ModelArchitecture, world_size: int, tp: int, cp: int, pp: int) -> Iterator[Layout]:
    per_stage = world_size // pp
    eps = divisors(model.moe.num_experts, per_stage) if model.moe else [1]
    etps = {1, tp} if model.moe and not model.linear_biases else {1}  # the engine does not shard experts that have biases
    for ep in eps:
        for etp in etps:
            # Experts are sharded only where expert parallelism cannot grow any more.
            if per_stage % (ep * etp) or (etp > 1 and (ep < max(eps) and ep * etp < per_stage and ep * 2 in eps)):
                continue
            for uneven in pipelines(model.num_layers, pp):
                try:
                    yield Layout(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, **uneven)
                except LayoutError:
                    continue


@cache
def pipelines(num_layers: int, pp: int) -> tuple[dict[str, int], ...]:
    """Ways to divide the layers over the pipeline stages.

    Args:
        num_layers: Layers of the model.
        pp: Pipeline stages.

    Returns:
        Keyword arguments of Layout: `vpp` where pp divides the layers (equal stages, with and without interleaving); otherwise
        sizes of the first and last stage that differ from the others'.
    """
    if pp > num_layers:
        return ()
    if num_layers % pp == 0:
        return tuple({"vpp": vpp} for vpp in divisors(num_layers // pp, MOST_CHUNKS if pp > 1 else 1))
    if pp == 2:
        return ({"first_stage_layers": num_layers - num_layers // 2},)
    found = []
    for inner in (-(-num_layers // pp), num_layers // pp):
        ends = num_layers - inner * (pp - 2)
        if 2 <= ends <= 2 * (inner + 1):
            found.append({"first_stage_layers": ends - ends // 2, "last_stage_layers": ends // 2})
    return tuple(found)
