"""What is refused before a run begins because of its model's folder."""

import json
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from megatron_rl.config import Config, ConfigError, RunFolder
from megatron_rl.conversion import QuantisedAs, hf_to_megatron, make_random_model, megatron_to_hf
from megatron_rl.launch.prepare import prepare
from megatron_rl.orchestrator.commands import server_process
from megatron_rl.orchestrator.devices import local_plan
from megatron_rl.precision import FORMATS
from megatron_rl.records import ModelContract, read_model_contract
from megatron_rl.tasks import TaskError, TextEncoder
from megatron_rl.trainer.model_folder import open_model

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def config(model: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": model, "max_sequence_length": 64},
            "task": {"name": "products"},
            "rollouts": {"max_new_tokens": 8},
        }
    )


@pytest.mark.parametrize("name", FORMATS)
def test_from_a_quantised_folder_servers_and_trainer_get_the_unquantised_model(tmp_path: Path, name: str) -> None:
    make_random_model(tmp_path / "unquantised", MODEL, seed=0)
    hf_to_megatron(tmp_path / "unquantised", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "quantised", quantise=QuantisedAs(FORMATS[name]()))
    assert "quantization_config" in json.loads((tmp_path / "quantised" / "config.json").read_text())
    run = RunFolder(tmp_path / "run")
    run.make()
    for _ in range(2):  # a resumed run finds it there
        assert prepare(config(tmp_path / "quantised"), run)["model_type"] == "qwen3"
    assert "quantization_config" not in json.loads((run.model / "config.json").read_text())
    assert (run.model / "tokenizer.json").is_file() and not list(run.model.glob("*.safetensors"))
    assert run.weights.resolve() == tmp_path / "quantised"
    hf_to_megatron(tmp_path / "quantised", tmp_path / "dequantised")
    dequantised, read = open_model(tmp_path / "dequantised"), open_model(run.weights)
    assert dequantised.keys() == read.keys() and all(torch.equal(read[n], dequantised[n]) for n in read)
    plain = RunFolder(tmp_path / "plain")
    plain.make()
    prepare(config(tmp_path / "dequantised"), plain)
    assert plain.weights == plain.model


def test_yarn_reaches_further_than_the_config_says(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    for name, rope in (("plain", None), ("yarn", yarn)):
        make_random_model(tmp_path / name, MODEL if rope is None else {**MODEL, "rope_parameters": rope}, seed=0)

    def at(length: int, name: str) -> Config:
        of = config(tmp_path / name)
        return of.model_copy(update={"model": of.model.model_copy(update={"max_sequence_length": length})})

    make_random_model(tmp_path / "linear", {**MODEL, "rope_scaling": {"type": "linear", "factor": 2.0}}, seed=0)
    prepare(at(128, "linear"), None)
    with pytest.raises(ConfigError, match="max_sequence_length = 129 .*scaled positions reach 128"):
        prepare(at(129, "linear"), None)
    prepare(at(128, "yarn"), None)
    with pytest.raises(
        ConfigError, match="max_sequence_length = 129 .*max_position_embeddings = 64, and its scaled positions reach 128"
    ):
        prepare(at(129, "yarn"), None)
    with pytest.raises(
        ConfigError, match="max_sequence_length = 65 .*max_position_embeddings = 64; lower it, or give config.json"
    ):
        prepare(at(65, "plain"), None)


@pytest.mark.parametrize(("activations", "algorithm"), [("full", "W4A16_NVFP4"), ("nvfp4", "NVFP4")])
def test_servers_with_nvfp4_layers_get_a_config_with_the_quantisation(tmp_path: Path, activations: str, algorithm: str) -> None:
    """The trainer's model is unchanged."""
    make_random_model(tmp_path / "m", {**MODEL, "intermediate_size": 64}, seed=0)
    plain = config(tmp_path / "m").model_dump()

    def on(device: str) -> Config:
        # With Transformer Engine, inputs of four bits need its FP4 products.
        training = "native" if (device, activations) == ("cuda", "nvfp4") else "qat"
        precision = {"training": training, "rollouts": "nvfp4", "activations": activations, "modules": ["mlp"]}
        sync = {"probe_tolerance": 1.0}
        return Config.model_validate(
            plain | {"run": plain["run"] | {"device": device}, "precision": precision, "weight_sync": sync}
        )

    quantised = on("cuda")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for _ in range(2):  # a resumed run finds it there
        prepare(quantised, run)
    unquantised, described = (json.loads((folder / "config.json").read_text()) for folder in (run.model, run.nvfp4_model))
    assert "quantization_config" not in unquantised and described.pop("quantization_config") == {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": 16,
        "config_groups": ANY,
        "ignore": ["lm_head", *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")],
    }
    assert described == unquantised and not list(run.nvfp4_model.glob("*.safetensors"))
    for device, folder in (("cuda", run.nvfp4_model), ("cpu", run.model)):
        of = on(device)
        plan = local_plan(of, ["0", "1", "2", "3"])
        argv = server_process(of, run, plan, 0, "127.0.0.1", 8000, 0, "key", has_moe_layers=False).argv
        assert argv[argv.index("--model") + 1] == str(folder)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    make_random_model(tmp_path / "m", MODEL, seed=0)
    prepare(config(tmp_path / "m"), None)
    settings = tmp_path / "m" / "config.json"
    before = settings.read_text()
    (tmp_path / "m" / "generation_config.json").unlink(missing_ok=True)
    settings.write_text(json.dumps({**json.loads(before), "eos_token_id": 5000}))
    with pytest.raises(ConfigError, match="eos_token_id is 5000, and the model has ids 0..127"):
        prepare(config(tmp_path / "m"), None)
    settings.write_text(before)
    with pytest.raises(TaskError, match="has no chat template, but task.chat_template = true"):
        prepare(with_chat_template(config(tmp_path / "m")), None)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(TaskError, match="cannot be read as a tokenizer"):
        prepare(config(tmp_path / "m"), None)


def test_the_first_prompt_is_rendered_and_a_turn_that_nothing_ends_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    make_random_model(folder, MODEL, seed=0)
    ids = TextEncoder(folder, config(folder).task).continuation
    plain = prepare(config(folder), None)
    assert str(plain["first_prompt"]).startswith("first prompt: '") and "end_of_turn" not in plain
    (folder / "chat_template.jinja").write_text("{% for m in messages %}U{{ m.content }}<bos>{% endfor %}")
    chat = with_chat_template(config(folder))
    said = prepare(chat, None)
    (bos,) = ids("<bos>")
    assert f"tokens: [{ids('U')[0]}, " in str(said["first_prompt"]) and "<bos>', 89 tokens" in str(said["first_prompt"])
    assert f"closes a turn with '<bos>' ({bos}), which is not among" in str(said["end_of_turn"])
    assert f"rollouts.stop_tokens = [{bos}]" in str(said["end_of_turn"])
    ended = chat.model_copy(update={"rollouts": chat.rollouts.model_copy(update={"stop_tokens": (bos,)})})
    assert "end_of_turn" not in prepare(ended, None)
    wrong = chat.model_copy(update={"rollouts": chat.rollouts.model_copy(update={"stop_tokens": ("<nothing>",)})})
    with pytest.raises(TaskError, match="stop_tokens has '<nothing>', which is no token"):
        prepare(wrong, None)
    (folder / "chat_template.jinja").write_text("{{ strftime_tomorrow() }}")
    with pytest.raises(TaskError, match="cannot be rendered .*strftime_tomorrow"):
        prepare(chat, None)


def test_a_model_of_random_weights_has_no_chat_template() -> None:
    plain = config(Path("m"))
    random = plain.model_copy(update={"model": plain.model.model_copy(update={"path": None, "architecture": MODEL})})
    prepare(random, None)
    with pytest.raises(ConfigError, match="without a chat template; set it to false"):
        prepare(with_chat_template(random), None)


def with_chat_template(of: Config) -> Config:
    return of.model_copy(update={"task": of.task.model_copy(update={"chat_template": True})})


def test_every_process_of_a_run_reads_the_models_contract_in_its_folder(tmp_path: Path) -> None:
    """A run of an earlier version has the model but not this file: preparing it again, as a resume does, writes it."""
    make_random_model(tmp_path / "hf", MODEL, seed=0)
    run = RunFolder(tmp_path / "run")
    run.make()
    prepare(config(tmp_path / "hf"), run)
    expected = ModelContract(vocab_size=128, moe_layers=(), num_experts=0, experts_per_token=0)
    assert read_model_contract(run.model_contract) == expected
    run.model_contract.unlink()
    prepare(config(tmp_path / "hf"), run)
    assert read_model_contract(run.model_contract) == expected
