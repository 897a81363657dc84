"""A small model of the same family: what a layout is checked on or measured with, in place of the user's model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.weight_mapping.table import ParameterTable, family_of

# None of these is a feature of the model: names, code in its folder, token ids of its vocabulary, how its file is quantised, and
# what follows from sizes that are replaced. Multi-token prediction is neither checked nor measured.
_DROPPED = (
    "auto_map", "_name_or_path", "name_or_path", "pad_token_id", "unk_token_id", "quantization_config", "qk_head_dim",
    "num_nextn_predict_layers",
)  # fmt: skip


@dataclass(frozen=True)
class SmallSizes:
    """The sizes of a small model, by the keys of config.json."""

    fixed: Mapping[str, Any]
    """The value of each key that the config has. It wins over what is derived from the config's own value."""
    at_most: Mapping[str, int] = field(default_factory=dict)
    """The largest value of each key, for keys of a mixture of experts; a smaller value of the config stays."""
    yarn_positions: int | None = None
    """YaRN's original_max_position_embeddings, in tokens; None keeps the config's own."""


def shrink_model(hf_config: Mapping[str, Any], sizes: SmallSizes, *, tensor_parallel: int = 1) -> dict[str, Any]:
    """A config.json of the same family, with the features of the given one and small sizes.

    Args:
        hf_config: config.json of the user's model.
        sizes: What replaces the model's own sizes. It has to give vocabulary, hidden and head sizes and the number of layers.
        tensor_parallel: The user's tensor-parallel size. Where it is larger than the number of query groups, ranks share a group;
            the small model then has one group, so that ranks of a small layout share it as well.

    Returns:
        A new config, without values that are None.

    Raises:
        UnknownFamilyError: The model's family is not known.
    """
    small = {key: value for key, value in hf_config.items() if value is not None and key not in _DROPPED}
    architecture = ParameterTable(hf_config).architecture
    small |= {
        "architectures": [family_of(hf_config).causal_lm],
        "model_type": architecture.model_type,
        "bos_token_id": 2,
        "eos_token_id": 1,
        **_attention(hf_config, sizes, tensor_parallel),
        **_rope(hf_config, sizes),
        **(_experts(hf_config, sizes) if architecture.moe else {}),
    }
    small |= {key: size for key, size in sizes.fixed.items() if key in small}
    if (
        hf_config.get("kv_lora_rank") is not None
    ):  # latent attention: every head has its own keys, and only the rotary part has a head_dim
        small |= {"num_key_value_heads": small["num_attention_heads"], "head_dim": small["qk_rope_head_dim"]}
    if isinstance(small.get("layer_types"), list):
        small["layer_types"] = small["layer_types"][: small["num_hidden_layers"]]
    return small


def _attention(hf_config: Mapping[str, Any], sizes: SmallSizes, tensor_parallel: int) -> dict[str, Any]:
    """As many query groups as heads, one group, or two heads a group, whichever the model has; one where ranks share groups."""
    heads = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or heads
    small_heads = sizes.fixed["num_attention_heads"]
    if groups == heads:
        small_groups = small_heads
    elif groups == 1 or groups < tensor_parallel:
        small_groups = 1
    else:
        small_groups = small_heads // 2
    return {"num_key_value_heads": small_groups, "head_dim": sizes.fixed["head_dim"]}


def _rope(hf_config: Mapping[str, Any], sizes: SmallSizes) -> dict[str, Any]:
    """YaRN's original length, so that positions are beyond it. The constants of llama3's scaling belong to it and stay."""
    if sizes.yarn_positions is None:
        return {}
    changed = {}
    for key in ("rope_scaling", "rope_parameters"):
        settings = hf_config.get(key)
        if isinstance(settings, Mapping) and "yarn" in (settings.get("rope_type"), settings.get("type")):
            changed[key] = {**settings, "original_max_position_embeddings": sizes.yarn_positions}
    return changed


def _experts(hf_config: Mapping[str, Any], sizes: SmallSizes) -> dict[str, Any]:
    """Experts a token, groups of experts, and which layers are dense: leading layers, or one of those in between."""
    small = {key: min(most, hf_config[key]) for key, most in sizes.at_most.items() if hf_config.get(key) is not None}
    if (hf_config.get("n_group") or 1) > 1:
        small |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    if "experts_per_token" in hf_config:
        small["experts_per_token"] = small.get("num_experts_per_tok", hf_config["experts_per_token"])
    if dense := hf_config.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0] if 0 in dense else [2]
    return small
