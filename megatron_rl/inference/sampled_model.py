"""What the records of a model look like, read from its config.json without loading it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.records import ModelContract


@dataclass(frozen=True)
class SampledModel:
    contract: ModelContract
    moe_layers: tuple[int, ...]
    """Numbers of the layers with experts: the engine's routes have a column for every layer, the records only for these."""


def read_sampled_model(folder: Path, num_tokens: int) -> SampledModel:
    """num_tokens: of the tokenizer. Rows of the embedding beyond them are padding, which no keep-set may name."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    decoder = config.get("text_config", config)
    layers = moe_layers(decoder)
    contract = ModelContract(
        vocab_size=min(decoder["vocab_size"], num_tokens),
        num_moe_layers=len(layers),
        num_experts=num_experts(decoder),
        experts_per_token=decoder["num_experts_per_tok"] if layers else 0,
    )
    return SampledModel(contract, layers)


def num_experts(config: dict[str, Any]) -> int:
    """0 for a dense model; each family spells the key in its own way."""
    return next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), 0)


def moe_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Layers with experts: not the leading dense ones (DeepSeek, GLM), not those listed as dense, every n-th (Qwen, DeepSeek)."""
    if not num_experts(config):
        return ()
    first = config.get("first_k_dense_replace", 0)
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)  # Qwen counts layers from 1
    every = config.get("moe_layer_freq", 1)  # DeepSeek from 0
    numbers = range(first, config["num_hidden_layers"])
    return tuple(n for n in numbers if n not in dense and (n + 1) % step == 0 and n % every == 0)
