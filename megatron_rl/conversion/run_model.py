"""The model of a run: checked against the run's configuration, described, and written into the run's folder."""

from math import prod
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, ConfigError, RunFolder
from megatron_rl.conversion.model_files import QUANTISATION, hf_config_of, published_config, read_config, write_model_files
from megatron_rl.conversion.opening import open_checkpoint, table_of
from megatron_rl.conversion.outgoing import left_out
from megatron_rl.conversion.partial_folder import PartialFolder
from megatron_rl.conversion.random_model import make_random_model
from megatron_rl.conversion.tokenizer_file import TOKENIZER_FILE, original_file
from megatron_rl.precision import check_shards, selection_of, stored_format
from megatron_rl.records import write_model_contract
from megatron_rl.tasks import TextEncoder
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, Placement


def checked_hf_config(config: Config, *, is_dry: bool = False) -> dict[str, Any]:
    """config.json of the run's model, whose folder is complete and fits the configuration.

    Args:
        config: The run's.
        is_dry: Nothing is started: the published config.json is enough while the folder does not exist.

    Raises:
        CheckpointError: The folder is not a complete model.
        ConfigError: The configuration asks for what the model does not have.
        TaskError: The tokenizer, or its chat template, cannot be read.
    """
    if config.model.path is None:
        if config.task.chat_template:
            raise ConfigError(
                "task.chat_template = true: a model from model.architecture has a character tokenizer without a chat "
                "template; set it to false"
            )
        return dict(config.model.architecture or {})
    if is_dry and published_config(config.model):
        return hf_config_of(config)
    if not config.model.path.exists():
        raise ConfigError(
            f"model.path = {config.model.path} does not exist; fetch the model's folder, and name it there (--dry-run, plan and "
            "check need model.published_config alone)"
        )
    checkpoint = open_checkpoint(config.model.path)
    checkpoint.check(table_of(checkpoint))
    if config.model.mtp == "trained" and not table_of(checkpoint).with_mtp:
        raise ConfigError(f"model.mtp = 'trained': {config.model.path} has no layer for multi-token prediction; remove model.mtp")
    _check_tokenizer(config.model.path, config, int(checkpoint.config["vocab_size"]))
    return checkpoint.config


def describe_model(hf_config: dict[str, Any], config: Config) -> dict[str, object]:
    """What the model is and how the layout divides it, as plain values for a person.

    Raises:
        UserError: Model, layout and configuration do not fit one another.
    """
    layout: Layout = config.parallel_layout
    padded = layout.padded_vocab_size(int(hf_config.get("vocab_size", 0)))
    table = ParameterTable(hf_config, padded_vocab_size=padded, with_mtp=config.model.mtp == "trained")
    model = table.architecture
    if config.model.mtp == "trained" and not table.with_mtp:
        raise ConfigError(
            f"model.mtp = 'trained': this {model.model_type} has no layer for multi-token prediction; remove model.mtp"
        )
    placement = Placement(table, layout)
    quantised = selection_of(config.precision, table).names
    held_by_all = (p for rank in range(layout.world_size) for p in placement.held_by(rank).values())
    check_shards(config.precision, (p for p in held_by_all if p.parameter.name in quantised))
    if config.model.max_sequence_length > model.max_positions:
        reaches_further = model.max_positions > model.max_position_embeddings
        extended = f", and its scaled positions reach {model.max_positions}" if reaches_further else ""
        raise ConfigError(
            f"model.max_sequence_length = {config.model.max_sequence_length} is above the model's max_position_embeddings = "
            f"{model.max_position_embeddings}{extended}; lower it, or give config.json a rope_scaling of type yarn "
            "as the model's authors describe it"
        )
    held = [sum(prod(p.shape) for p in placement.held_by(rank).values()) for rank in range(layout.world_size)]
    return {
        "model_type": model.model_type,
        "parameters": table.num_parameters,
        "layers": model.num_layers,
        "moe_layers": len(model.moe_layers),
        "experts": model.moe.num_experts if model.moe else 0,
        "experts_per_token": model.moe.top_k if model.moe else 0,
        "vocab_size": model.vocab_size,
        "mtp_layers": model.num_mtp_layers,
        "parameters_per_rank_max": max(held),
        "parameters_per_rank_min": min(held),
    }


def write_run_model(run: RunFolder, config: Config, hf_config: dict[str, Any]) -> None:
    """Write the model's folders and its contract into the run's folder.

    Also for a run that is resumed: one of an earlier version lacks the contract.
    """
    write_model_contract(run.model_contract, ParameterTable(hf_config).architecture.contract)
    if not run.model.exists():
        if config.model.path is None:
            make_random_model(run.model, hf_config, seed=config.run.seed)
        else:
            _link_model(run, config.model.path.resolve())
    if config.servers_have_nvfp4_layers:
        table = ParameterTable(hf_config)
        described = stored_format(config.precision).config(*left_out(table, selection_of(config.precision, table)))
        run.nvfp4_model.mkdir(exist_ok=True)
        write_model_files(run.nvfp4_model, read_config(run.model) | {"quantization_config": described}, run.model)


def _link_model(run: RunFolder, source: Path) -> None:
    """The model's folder as it is, or, where its weights are quantised, one that describes the unquantised model.

    From the former the servers would be built for quantised weights, but the trainer sends the values that they stand for. The
    weights stay where they are, and are dequantised as they are read.
    """
    config = read_config(source)
    if QUANTISATION not in config:
        run.model.symlink_to(source, target_is_directory=True)
        return
    run.quantised_model.unlink(missing_ok=True)
    run.quantised_model.symlink_to(source, target_is_directory=True)
    staging = PartialFolder(run.model)
    write_model_files(staging.path, {key: value for key, value in config.items() if key != QUANTISATION}, source)
    staging.publish()


def _check_tokenizer(folder: Path, config: Config, vocab_size: int) -> None:
    """That prompts can be encoded and completions can end."""
    if not (folder / TOKENIZER_FILE).exists():
        if original := original_file(folder):
            raise ConfigError(
                f"model.path = {folder}: {TOKENIZER_FILE} is missing, and there is {original.name}; "
                f"`megatron-rl tokenizer {folder}` makes {TOKENIZER_FILE} from it"
            )
        raise ConfigError(f"model.path = {folder}: {TOKENIZER_FILE} is missing; save the tokenizer next to the weights")
    text = TextEncoder(folder, config.task)
    text.stop_ids(config.rollouts.stop_tokens)
    for what, least in (("the tokenizer's largest id", text.num_tokens), ("eos_token_id", max(text.eos_ids) + 1)):
        if least > vocab_size:
            raise ConfigError(
                f"model.path = {folder}: {what} is {least - 1}, and the model has ids 0..{vocab_size - 1} (vocab_size): "
                "tokenizer and weights belong to different models"
            )
