"""What travels to the servers, and what comes out at the other end."""

import pytest
import torch

from megatron_rl.precision import Unpacker, amax_of, fake_quantise, packed_specs, quantised_stream

NAMES = ["model.norm.weight", "a.gate_proj.weight", "a.up_proj.weight"]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16,), (8, 48), (8, 48)]
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in zip(NAMES, shapes, strict=True)}


def packed() -> list[tuple[str, torch.Tensor]]:
    plain = tensors()
    group_of = dict.fromkeys(NAMES[1:], "gate and up")
    amax = torch.maximum(*(amax_of(plain[name]) for name in NAMES[1:]))
    return [
        (name, tensor) for name, tensor in quantised_stream(plain.items(), group_of, {"gate and up": amax}) if tensor is not None
    ]


def test_the_stream_is_what_its_specs_announce() -> None:
    announced = [(NAMES[0], (16,), torch.bfloat16), *(spec for name in NAMES[1:] for spec in packed_specs(name, (8, 48)))]
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in packed()] == announced


def test_ranks_that_only_gather_see_the_same_names() -> None:
    nothing = quantised_stream([(name, None) for name in NAMES], dict.fromkeys(NAMES[1:], "g"), {})
    assert list(nothing) == [(name, None) for name, _ in packed()]


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
