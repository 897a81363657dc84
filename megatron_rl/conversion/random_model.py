"""A model folder with random weights: for models that are trained from scratch, and for checks and tests."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.conversion.character_tokenizer import SPECIAL_TOKENS, save_character_tokenizer
from megatron_rl.conversion.errors import CheckpointError
from megatron_rl.conversion.hf_writer import write_hf_checkpoint
from megatron_rl.weight_mapping import ParameterTable, Role, family_of

_CONSTANT = {Role.NORM: 1.0, Role.BIAS: 0.0, Role.SELECTION_BIAS: 0.0}


def make_random_model(
    folder: str | Path,
    hf_config: Mapping[str, Any],
    *,
    seed: int,
    tokenizer: Literal["characters"] | None = "characters",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a complete model folder: config, weights initialised as transformers does, and a tokenizer.

    The same seed gives the same weights, whatever the order or machine.

    Args:
        folder: The new folder.
        hf_config: `model_type` and the sizes; `architectures`, and with a tokenizer its token ids, are filled in.
        seed: Seed of the weights.
        tokenizer: "characters", or None for a folder without a tokenizer.
        dtype: Dtype of the weights.

    Raises:
        CheckpointError: The folder exists, or the config contradicts the tokenizer.
    """
    config = {"architectures": [family_of(hf_config).causal_lm], **hf_config}
    with TemporaryDirectory() as assets:
        if tokenizer is not None:
            config |= _character_assets(Path(assets), hf_config)
        table = ParameterTable(config, with_mtp=True)
        weights = random_hf_tensors(table, seed, pad_token_id=config.get("pad_token_id"))
        write_hf_checkpoint(folder, weights, config, dtype=dtype, specs=table.hf_specs(dtype), assets_from=assets)


def random_hf_tensors(table: ParameterTable, seed: int, pad_token_id: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """fp32 weights by Hugging Face names: normal with std `initializer_range`; norms 1; biases and the padding embedding 0."""
    std = table.architecture.initializer_range
    for name, shape in table.hf_shapes.items():
        role = table.by_hf_name(name)[0].role
        if role in _CONSTANT:
            yield name, torch.full(shape, _CONSTANT[role])
            continue
        # Seeded by name, so that a tensor depends neither on which others there are nor on their order.
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        values = torch.randn(shape, generator=generator).mul_(std)
        if role is Role.EMBEDDING and pad_token_id is not None:
            values[pad_token_id] = 0
        yield name, values


def _character_assets(folder: Path, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """Write tokenizer and generation config to `folder`; returns the token ids for config.json."""
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    for key, value in ids.items():
        if hf_config.get(key) not in (None, value):
            raise CheckpointError(
                f"{key} = {hf_config[key]}, but the character tokenizer has {SPECIAL_TOKENS[value]} at {value}; remove the key"
            )
    model = family_of(hf_config).architecture(hf_config)
    save_character_tokenizer(folder, model.vocab_size, model.max_position_embeddings)
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    return ids
