"""A model's tensors on their way to the servers, those of a selection as NVFP4, under ModelOpt's names."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from megatron_rl.config.sections import Precision
from megatron_rl.precision.checkpoint import CheckpointFormat, ModelOpt


def wire_format(precision: Precision, *, own_layers: bool) -> ModelOpt:
    """own_layers: whether the servers have NVFP4 layers; others unpack what they get.

    vLLM's layers have a place for the scale of activations even where they quantise none (W4A16), and a layer is loaded as soon as all of
    it has come: without this scale none would be before the end of the update, and the server would hold all weights twice.
    """
    return ModelOpt(precision.activation_amax) if own_layers else ModelOpt()


def quantised_stream(
    tensors: Iterable[tuple[str, Tensor | None]],
    group_of: Mapping[str, str],
    amaxes: Mapping[str, Tensor],
    stored_as: CheckpointFormat,
) -> Iterator[tuple[str, Tensor | None]]:
    """`tensors` by Hugging Face names, each quantised one as its packed tensors. None (on a rank that only gathers) stays None.

    group_of: of the quantised tensors, as Selection has it. amaxes: f32 [], by group.
    """
    for name, tensor in tensors:
        if name not in group_of:
            yield name, tensor
        elif tensor is None:
            yield from ((spec.name, None) for spec in stored_as.specs(name, (0, 0)))
        else:
            yield from stored_as.tensors(name, tensor, amaxes[group_of[name]].to(tensor.device)).items()
