"""What travels to the servers, and what comes out at the other end."""

import pytest
import torch

from megatron_rl.config.sections import Precision
from megatron_rl.precision import CheckpointFormat, Unpacker, amax_of, fake_quantise, quantised_stream, wire_format
from megatron_rl.wire.tensor_spec import TensorSpec

TO_UNPACK = wire_format(Precision(), own_layers=False)
TO_OWN_LAYERS = wire_format(Precision(activation_amax=64.0), own_layers=True)
NAMES = ["model.norm.weight", "a.gate_proj.weight", "a.up_proj.weight"]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16,), (8, 48), (8, 48)]
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in zip(NAMES, shapes, strict=True)}


def packed(stored_as: CheckpointFormat = TO_UNPACK) -> list[tuple[str, torch.Tensor]]:
    plain = tensors()
    group_of = dict.fromkeys(NAMES[1:], "gate and up")
    amax = torch.maximum(*(amax_of(plain[name]) for name in NAMES[1:]))
    stream = quantised_stream(plain.items(), group_of, {"gate and up": amax}, stored_as)
    return [(name, tensor) for name, tensor in stream if tensor is not None]


@pytest.mark.parametrize("stored_as", [TO_UNPACK, TO_OWN_LAYERS], ids=["to unpack", "to own layers"])
def test_the_stream_is_what_its_specs_announce(stored_as: CheckpointFormat) -> None:
    announced = [
        TensorSpec(NAMES[0], (16,), "bfloat16"),
        *(spec for name in NAMES[1:] for spec in stored_as.specs(name, (8, 48))),
    ]
    assert [TensorSpec.of(name, tensor) for name, tensor in packed(stored_as)] == announced


@pytest.mark.parametrize("stored_as", [TO_UNPACK, TO_OWN_LAYERS], ids=["to unpack", "to own layers"])
def test_ranks_that_only_gather_see_the_same_names(stored_as: CheckpointFormat) -> None:
    nothing = quantised_stream([(name, None) for name in NAMES], dict.fromkeys(NAMES[1:], "g"), {}, stored_as)
    assert list(nothing) == [(name, None) for name, _ in packed(stored_as)]


def test_layers_of_their_own_get_the_same_bytes_and_the_scale_of_activations() -> None:
    to_unpack, to_layers = dict(packed()), dict(packed(TO_OWN_LAYERS))
    assert to_layers.keys() - to_unpack.keys() == {"a.gate_proj.input_scale", "a.up_proj.input_scale"}
    assert all(
        torch.equal(to_layers[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in to_unpack.items()
    )
    assert to_layers["a.up_proj.input_scale"].item() == pytest.approx(64.0 / (6 * 448))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_weights_are_the_trainers_values(dtype: torch.dtype) -> None:
    sent, plain = packed(), tensors()
    unpacker = Unpacker([name for name, _ in sent], dtype)
    whole = dict(found for name, tensor in sent if (found := unpacker.add(name, tensor)) is not None)
    amax = torch.maximum(*(amax_of(plain[name]) for name in NAMES[1:]))
    assert list(whole) == NAMES and not unpacker.incomplete
    assert torch.equal(whole[NAMES[0]], plain[NAMES[0]])
    assert all(torch.equal(whole[name], fake_quantise(plain[name].to(dtype), amax)) for name in NAMES[1:])


def test_a_weight_of_which_a_part_is_missing_is_named() -> None:
    sent = packed()
    unpacker = Unpacker([name for name, _ in sent], torch.float32)
    for name, tensor in sent[:-1]:
        unpacker.add(name, tensor)
    assert unpacker.incomplete == ["a.up_proj"]


def test_a_stream_without_global_scales_passes_as_it_is() -> None:
    unpacker = Unpacker(["a.weight", "a.weight_scale"], torch.float32)
    tensor = torch.ones(2, 16)
    assert unpacker.add("a.weight", tensor) == ("a.weight", tensor)
