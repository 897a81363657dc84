"""Which layers have experts, family by family, as transformers builds them."""

import json

import pytest

from megatron_rl.inference.sampled_model import moe_layers, read_sampled_model


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 4, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}, (0, 1, 2, 3)),
        ({"num_hidden_layers": 6, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"num_hidden_layers": 3, "num_local_experts": 8}, (0, 1, 2)),
        ({"num_hidden_layers": 5, "n_routed_experts": 8, "first_k_dense_replace": 2, "moe_layer_freq": 1}, (2, 3, 4)),
        ({"num_hidden_layers": 6, "n_routed_experts": 8, "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"num_hidden_layers": 5}, ()),
        ({"num_hidden_layers": 5, "num_experts": None}, ()),
    ],
)
def test_moe_layers(config, layers):
    assert moe_layers(config) == layers


def test_padding_rows_are_no_tokens(tmp_path):
    config = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3, "vocab_size": 248320}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    model = read_sampled_model(tmp_path, num_tokens=248077)
    assert (model.contract.vocab_size, model.contract.num_experts, model.contract.experts_per_token) == (248077, 8, 3)
    assert model.moe_layers == (0, 1) and model.contract.num_moe_layers == 2
    assert read_sampled_model(tmp_path, num_tokens=250000).contract.vocab_size == 248320
