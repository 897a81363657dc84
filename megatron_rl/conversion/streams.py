"""A whole model from shards that are brought together one parameter at a time."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megatron_rl.weight_mapping import Assembly, Parameter, ParameterTable


def hf_tensors(table: ParameterTable, gather: Callable[[Parameter], Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of the whole model, one parameter at a time in the order of the table.

    gather: returns the shards of a parameter in the order of `Placement.owners`. How they come here (a file, a list) is the caller's.
    """
    assembly = Assembly()
    for parameter in table.parameters:
        yield from assembly.add(parameter, parameter.unshard(gather(parameter)))
