"""The two streams between a checkpoint and the ranks: what a rank loads, and what the ranks give back."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from megatron_rl.layouts import Assembly, HeldParameter, Parameter, ParameterTable, Placement


def rank_shards(tensors: Mapping[str, Tensor], placement: Placement, rank: int) -> Iterator[tuple[HeldParameter, Tensor]]:
    """Every parameter that `rank` holds, with this rank's piece of it.

    tensors: Hugging Face names to tensors, usually an HfCheckpoint, of which only the needed bytes are then read. The pieces
    may be views of it: copy them into the model's parameters (which also casts them).
    """
    for held in placement.held_by(rank).values():
        yield held, held.shard_from_hf(tensors)


def hf_tensors(table: ParameterTable, gather: Callable[[Parameter], Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of the whole model, one parameter at a time in the order of the table.

    gather: returns the shards of a parameter in the order of `Placement.owners`. How they come here (a collective, a file, a
    list in a test) is the caller's; all that take part in a collective have to go through `table.parameters` in this order.
    """
    assembly = Assembly()
    for parameter in table.parameters:
        yield from assembly.add(parameter, parameter.unshard(gather(parameter)))
