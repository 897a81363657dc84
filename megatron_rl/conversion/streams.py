"""A complete model from shards that are gathered one parameter at a time."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megatron_rl.weight_mapping import Assembly, Parameter, ParameterTable


def hf_tensors(table: ParameterTable, gather: Callable[[Parameter], Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of the model, one parameter at a time in the table's order.

    Args:
        table: The model's parameters.
        gather: Returns the shards of a parameter in the order of `Placement.owners`, from wherever they are.

    Yields:
        Names and full tensors.
    """
    assembly = Assembly()
    for parameter in table.parameters:
        yield from assembly.add(parameter, parameter.unshard(gather(parameter)))
