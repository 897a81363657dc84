"""The tensors of a weight update, quantised ones as NVFP4 under ModelOpt's names."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from megatron_rl.config.sections import Precision
from megatron_rl.precision.checkpoint import CheckpointFormat, ModelOpt


def wire_format(precision: Precision, *, own_layers: bool) -> ModelOpt:
    """The format in which weight updates are sent.

    vLLM's layers have a place for the scale of activations even where they quantise none (W4A16), and a layer is loaded as soon
    as all its tensors have arrived: without this scale no layer would be complete before the end of the update, and the server
    would hold all weights twice.

    Args:
        precision: The run's section [precision].
        own_layers: Whether the servers have NVFP4 layers; others unpack the weights.
    """
    return ModelOpt(precision.activation_amax) if own_layers else ModelOpt()


def quantised_stream(
    tensors: Iterable[tuple[str, Tensor | None]],
    group_of: Mapping[str, str],
    amaxes: Mapping[str, Tensor],
    stored_as: CheckpointFormat,
) -> Iterator[tuple[str, Tensor | None]]:
    """The tensors, each quantised one as its packed tensors.

    Args:
        tensors: By Hugging Face names; None (on a rank that only takes part in gathering) stays None.
        group_of: Group of each quantised tensor, as Selection has it.
        amaxes: f32 [], by group.
        stored_as: The format of quantised tensors.

    Yields:
        Names and tensors, in the order of `tensors`.
    """
    for name, tensor in tensors:
        if name not in group_of:
            yield name, tensor
        elif tensor is None:
            yield from ((spec.name, None) for spec in stored_as.specs(name, (0, 0)))
        else:
            yield from stored_as.tensors(name, tensor, amaxes[group_of[name]].to(tensor.device)).items()
