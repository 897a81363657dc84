"""Random models: loadable, initialised as transformers does it, the same for the same seed."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_rl.conversion import CheckpointError, HfCheckpoint, make_random_model, random_hf_tensors
from megatron_rl.conversion.character_tokenizer import NUM_USED_TOKENS
from megatron_rl.weight_mapping import ParameterTable

MODELS = json.loads((Path(__file__).parents[2] / "data" / "small_models.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("random") / "model"
    make_random_model(out, MODELS["qwen3_moe"], seed=7)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_it(folder: Path) -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert isinstance(model, transformers.Qwen3MoeForCausalLM)
    assert (model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id) == (0, 1, 2)
    assert model.generation_config.eos_token_id == 1


def test_distribution_of_the_weights(folder: Path) -> None:
    checkpoint = HfCheckpoint.open(folder)
    for name, tensor in checkpoint.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor))
            continue
        drawn = tensor
        if name == "model.embed_tokens.weight":
            assert tensor[0].abs().max() == 0  # the padding token's row, as in transformers
            drawn = tensor[1:]
        # The estimate of a standard deviation from n values is off by 1 / sqrt(2 n); five times that is allowed.
        assert abs(float(drawn.std()) / 0.02 - 1) < 5 / (2 * drawn.numel()) ** 0.5
        assert abs(float(drawn.mean())) < 5 * 0.02 / drawn.numel() ** 0.5


def test_a_tensor_depends_on_seed_and_name_only() -> None:
    table = ParameterTable(MODELS["qwen3_moe"])
    first, again, other = (dict(random_hf_tensors(table, seed)) for seed in (1, 1, 2))
    shorter = dict(random_hf_tensors(ParameterTable({**MODELS["qwen3_moe"], "num_hidden_layers": 3}), 1))
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
    assert torch.equal(first[name], shorter[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("experts.3", "experts.4")])


def test_characters_survive_the_tokenizer(tokenizer) -> None:
    text = "\n" + "".join(chr(code) for code in range(32, 127))
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) == len(set(ids))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer(" 1 + 1 , 2\n\n ok ").input_ids) == " 1 + 1 , 2\n\n ok "


def test_special_tokens(tokenizer) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer("a<eos>").input_ids == [tokenizer.convert_tokens_to_ids("a"), 1]
    assert tokenizer.decode(tokenizer("a<eos>").input_ids, skip_special_tokens=True) == "a"


def test_unknown_characters_are_seen_and_every_id_has_a_name(tokenizer) -> None:
    assert tokenizer("né").input_ids[1] == tokenizer.unk_token_id
    assert len(tokenizer) == MODELS["qwen3_moe"]["vocab_size"]
    assert tokenizer.decode([NUM_USED_TOKENS]) == "<unused_0>"


def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size = 64: the character tokenizer needs at least 100"):
        make_random_model(tmp_path / "model", {**MODELS["llama"], "vocab_size": 64}, seed=0)


def test_contradicting_token_ids(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id = 5"):
        make_random_model(tmp_path / "model", {**MODELS["llama"], "eos_token_id": 5}, seed=0)


def test_without_a_tokenizer_the_vocabulary_is_free(tmp_path: Path) -> None:
    make_random_model(tmp_path / "model", {**MODELS["llama"], "vocab_size": 17}, seed=0, tokenizer=None, dtype=torch.bfloat16)
    checkpoint = HfCheckpoint.open(tmp_path / "model")
    assert checkpoint["lm_head.weight"].shape == (17, 40)
    assert checkpoint["lm_head.weight"].dtype == torch.bfloat16
    assert checkpoint.config["dtype"] == "bfloat16"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
