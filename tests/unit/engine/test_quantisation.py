"""NVFP4 in the trainer without a model: parameters of any module, and inputs of linear maps.

That whole models at several layouts compute with these values: tests/distributed/engine/test_quantisation.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.quantisation import ValueQuantiser, check_input_quantisation, quantise_inputs
from megatron_rl.precision import Selection, TorchQuantiser, amax_of, fake_quantise
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
CPU = torch.device("cpu")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class ForeignLinear(nn.Module):
    """Not Megatron's: it reads its parameter when it is called, as Transformer Engine's modules do."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight.t()


def test_any_module_multiplies_with_the_values_during_a_pass(alone) -> None:
    table = ParameterTable(MODEL)
    held = next(h for h in Placement(table, Layout(1)).held_by(0).values() if h.parameter.name == FC2)
    generator = torch.Generator().manual_seed(0)
    module = ForeignLinear(torch.randn(held.shape, generator=generator))
    before, inputs = module.weight.detach().clone(), torch.randn(5, held.shape[1], generator=generator)
    quantiser = ValueQuantiser(Selection(table, ["mlp"]), [(held, module.weight)], CPU, TorchQuantiser())
    values = fake_quantise(before, amax_of(before))
    with quantiser.passes():
        out = module(inputs)
        out.sum().backward()
    assert torch.equal(out, inputs @ values.t()) and not torch.equal(values, before)
    assert torch.equal(module.weight, before)
    assert torch.equal(module.weight.grad, torch.ones(5, held.shape[0]).t() @ inputs)


def test_inputs_are_quantised_and_their_gradient_goes_straight_through() -> None:
    linear, inputs = nn.Linear(32, 3, bias=False), torch.randn(2, 4, 32, requires_grad=True)
    plain = torch.randn(2, 4, 32)
    quantise_inputs([linear], 8.0, CPU)
    out = linear(inputs)
    rounded = fake_quantise(inputs.detach().flatten(0, -2), torch.tensor(8.0)).view_as(inputs)
    assert torch.equal(out, rounded @ linear.weight.t()) and not torch.equal(rounded, inputs)
    (out * plain[..., :3]).sum().backward()
    torch.testing.assert_close(inputs.grad, plain[..., :3] @ linear.weight)
    # Beyond the one magnitude that the global scale comes from, values are cut off at it (and rounded, here to itself).
    assert fake_quantise(torch.full((1, 16), 100.0), torch.tensor(8.0)).unique().tolist() == [8.0]


def test_inputs_of_transformer_engines_maps_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="fused norm.*train with precision.training = 'native'"):
        check_input_quantisation(has_transformer_engine=True)
