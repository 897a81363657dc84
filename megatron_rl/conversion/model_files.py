"""Files of a model folder other than weights: config.json, tokenizer, chat template, generation config."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.sections import Model
from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.errors import lfs_pointer

CONFIG_FILE = "config.json"
QUANTISATION = "quantization_config"
"""The key of config.json that says how the weights are quantised."""

# Tokenizer (with its code), chat templates, generation defaults, and code that config.json names in its auto_map.
_ASSETS = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "configuration_*.py",
    "modeling_*.py",
)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        CheckpointError: The file is missing or is not a JSON object.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} is not a model folder: it has no config.json; name the folder of a Hugging Face or a converted model"
        )
    return read_json(file)


def hf_config_of(config: Config) -> dict[str, Any]:
    """config.json of a run's model: the one in its folder, or the one written out in the configuration. Weights are not read.

    While the folder does not exist, it is the published one that the configuration names. How the weights are quantised is left
    out: the trainer computes with the values that they stand for.

    Raises:
        CheckpointError: None of them can be read.
    """
    if config.model.path is None:
        return dict(config.model.architecture or {})
    published = published_config(config.model)
    content = read_json(published) if published else read_config(config.model.path)
    return {key: value for key, value in content.items() if key != QUANTISATION}


def where_hf_config_is_from(config: Config) -> str | None:
    """A line that says so where `hf_config_of` reads the published one; None elsewhere."""
    if (published := published_config(config.model)) is None:
        return None
    return f"model: read from {published}, as its authors publish it; model.path = {config.model.path} does not exist here yet"


def published_config(model: Model) -> Path | None:
    """The published config.json, where it stands for a folder that does not exist; None elsewhere."""
    return model.published_config if model.path is not None and not model.path.exists() else None


def write_model_files(folder: Path, config: Mapping[str, Any], assets_from: Path | None) -> None:
    """Write config.json, and copy tokenizer, chat template, generation config and code.

    Args:
        folder: The new model folder.
        config: The content of config.json.
        assets_from: The model folder whose files are copied; None: none.
    """
    # TOML has no null, and so a model written out there lacks the key; transformers would then take DeepSeek-V3's own rank.
    nulls = {"q_lora_rank": None} if "kv_lora_rank" in config else {}
    write_json(folder / CONFIG_FILE, {**nulls, **config})
    if assets_from is None:
        return
    for path in (path for pattern in _ASSETS for path in assets_from.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: The file cannot be read or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(lfs_pointer(file) or f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must be a JSON object")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented and with sorted keys."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
