"""All layouts that divide a model over a number of ranks."""

from collections.abc import Iterator
from functools import cache

from megatron_rl.topology import Layout, LayoutError
from megatron_rl.weight_mapping import GroupedQueryAttention, ModelArchitecture

CONTEXT_FROM = 16384
"""Tokens of a sequence from which cutting it over ranks is looked at: below, other ways of cutting cost less."""
LONGEST_PIPELINE = 32
MOST_CHUNKS = 4


def divisors(number: int, most: int | None = None) -> list[int]:
    """Divisors of a number up to `most`, rising."""
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def candidate_layouts(model: ModelArchitecture, world_size: int, node: int, longest_sequence: int) -> Iterator[Layout]:
    """Pruned by what never pays.

    Tensor parallelism across nodes, sequences cut that are short, experts cut that have ranks to spare.
    """
    cps = [1] if longest_sequence <= CONTEXT_FROM else [n for n in (1, 2, 4, 8, 16) if longest_sequence // n >= 4096]
    for tp in tensor_sizes(model, node):
        for cp in cps:
            for pp in divisors(world_size // (tp * cp), LONGEST_PIPELINE) if world_size % (tp * cp) == 0 else []:
                yield from _with_experts(model, world_size, tp, cp, pp)


def tensor_sizes(model: ModelArchitecture, node: int) -> list[int]:
    """Tensor-parallel sizes within a node that divide heads, query groups and the hidden size."""
    a = model.attention
    sizes = [n for n in divisors(a.num_heads, node) if model.hidden_size % n == 0]
    if isinstance(a, GroupedQueryAttention):
        sizes = [n for n in sizes if a.num_query_groups % n == 0 or n % a.num_query_groups == 0]
    return sizes


def _with_experts(model: ModelArchitecture, world_size: int, tp: int, cp: int, pp: int) -> Iterator[Layout]:
    per_stage = world_size // pp
    eps = divisors(model.moe.num_experts, per_stage) if model.moe else [1]
    etps = {1, tp} if model.moe and not model.linear_biases else {1}  # the engine refuses to cut experts that have biases
    for ep in eps:
        for etp in etps:
            # An expert is cut where more of them cannot be spread.
            if per_stage % (ep * etp) or (etp > 1 and (ep < max(eps) and ep * etp < per_stage and ep * 2 in eps)):
                continue
            for uneven in pipelines(model.num_layers, pp):
                try:
                    yield Layout(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, **uneven)
                except LayoutError:
                    continue


@cache
def pipelines(num_layers: int, pp: int) -> tuple[dict[str, int], ...]:
    """Chunks and sizes of the first and last stage.

    Even ones, interleaved ones, and where nothing divides, two ends of their own size.
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
