"""A small copy of the user's model and layout, with every feature of both: what the checks run on.

Widths are small, differ from one another and make no square matrix: a missing transpose or a part in another's place shows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config import Config
from megatron_rl.records import Sampling
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping import ParameterTable, family_of

NUM_LAYERS = 4
"""One for each chunk of two interleaved stages."""
NUM_EXPERTS = 8
MAX_TOKENS = 40
"""Of a sequence, and of a microbatch: the sequences come to several microbatches."""
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=8)

_WIDTHS = {
    "vocab_size": 131,  # odd: with tensor parallelism Megatron's embedding has padded rows
    "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 56, "num_attention_heads": 4, "head_dim": 32,
    "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 18, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "n_routed_experts": NUM_EXPERTS, "sliding_window": 5,
    "max_position_embeddings": 128, "num_hidden_layers": NUM_LAYERS,
}  # fmt: skip
"""In place of whatever a config gives under these keys."""
_YARN_POSITIONS = 32

# No features of the model: names, code beside it, ids of a large vocabulary, how its file is quantised, what follows from sizes.
_DROPPED = (
    "auto_map",
    "_name_or_path",
    "name_or_path",
    "pad_token_id",
    "unk_token_id",
    "quantization_config",
    "qk_head_dim",
    "num_nextn_predict_layers",
)


def shrunk_layout(layout: Layout) -> Layout:
    """Every parallel size above 1 becomes 2, data-parallel only up to 8 ranks in all. A stage of its own size has one layer."""
    tp, cp, pp, vpp, ep, etp = (min(2, size) for size in (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp))
    dp = min(2, layout.dp)
    if tp * cp * pp == 8:
        dp = 1
    while tp * cp * dp % (ep * etp):  # fewer data-parallel ranks than experts' groups need
        dp *= 2
    first = None if layout.first_stage_layers is None else 1
    last = None if layout.last_stage_layers is None else (1 if first is None else NUM_LAYERS - 1)
    return Layout(
        tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, first_stage_layers=first, last_stage_layers=last
    )


def with_expert_replicas(layout: Layout) -> Layout:
    """The layout, widened until each expert lies on two ranks or more: only then are its gradients summed over ranks."""
    while layout.edp == 1:
        if layout.world_size == 8:
            layout = replace(layout, world_size=8 // layout.pp, pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None)
        layout = replace(layout, world_size=2 * layout.world_size)
    return layout


def shrunk_model(hf_config: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """A config.json of the same family with the same features. layout: the user's, which says how query groups are cut."""
    model = ParameterTable(hf_config).architecture
    small = {key: value for key, value in hf_config.items() if value is not None and key not in _DROPPED}
    small |= {key: width for key, width in _WIDTHS.items() if key in small}
    small |= {
        "architectures": [family_of(hf_config).causal_lm],
        "model_type": model.model_type,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    small |= _attention(hf_config, layout) | _rope(hf_config)
    if isinstance(small.get("layer_types"), list):
        small["layer_types"] = small["layer_types"][:NUM_LAYERS]
    return small | (_experts(hf_config) if model.moe else {})


def shrunk_config(config: Config, model: Mapping[str, Any], layout: Layout) -> Config:
    """The user's run with this model and layout, in fp32 on the CPU, both replays on, without a reference policy and without NVFP4,
    whose blocks the small widths do not divide into."""
    tree = config.model_dump()
    changes: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu"},
        "model": {"path": None, "architecture": dict(model), "dtype": "float32", "max_sequence_length": MAX_TOKENS},
        "layout": {
            "world_size": layout.world_size, "tensor": layout.tp, "pipeline": layout.pp, "virtual_pipeline": layout.vpp,
            "context": layout.cp, "expert": layout.ep, "expert_tensor": layout.etp,
            "first_stage_layers": layout.first_stage_layers, "last_stage_layers": layout.last_stage_layers,
            "sequence_parallel": tree["layout"]["sequence_parallel"] if layout.tp > 1 else None,
        },
        "trainer": {
            "max_tokens_per_microbatch": MAX_TOKENS, "updates_per_step": 1, "threads_per_rank": 1,
        },
        "rollouts": {
            "temperature": SAMPLING.temperature, "top_p": SAMPLING.top_p, "top_k": SAMPLING.top_k, "max_keep_set": SAMPLING.top_k,
            "max_new_tokens": SAMPLING.max_new_tokens, "max_turns": 1, "keep_set_source": "processed_logprobs",
        },
        # A gradient of about epsilon may take a step of either size; this one is above the rounding of the gradients.
        "optimizer": {"epsilon": 1e-6},
        "objective": {"kl_coefficient": 0.0, "keep_set_replay": True, "routing_replay": True},
        "weight_sync": {"transport": "gloo", "probe_tolerance": None},
        "precision": {"training": "full", "rollouts": "full", "activations": "full"},
        "metrics": {"entropy_full_tokens": 0},
    }  # fmt: skip
    for section, values in changes.items():
        tree[section] |= values
    return Config.model_validate(tree)


def _attention(hf_config: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """As many query groups as heads, one group, or two heads a group; one where the user's ranks cut through groups."""
    heads = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or heads
    small = 4 if groups == heads else 1 if groups == 1 or groups < layout.tp else 2
    latent = hf_config.get("kv_lora_rank") is not None
    return {"num_key_value_heads": small} | (
        {"head_dim": _WIDTHS["qk_rope_head_dim"]} if latent else {"head_dim": _WIDTHS["head_dim"]}
    )


def _rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's own length, so that positions lie beyond it; llama3's constants are part of its definition."""
    changed = {}
    for key in ("rope_scaling", "rope_parameters"):
        settings = hf_config.get(key)
        if isinstance(settings, Mapping) and "yarn" in (settings.get("rope_type"), settings.get("type")):
            changed[key] = {**settings, "original_max_position_embeddings": _YARN_POSITIONS}
    return changed


def _experts(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts a token, groups of experts, and which layers are dense: one leading layer where there are leading ones."""
    grouped = (hf_config.get("n_group") or 1) > 1
    small: dict[str, Any] = {"num_experts_per_tok": 4 if grouped else min(3, hf_config["num_experts_per_tok"])}
    if grouped:
        small |= {"n_group": 4, "topk_group": 2}
    if "experts_per_token" in hf_config:
        small["experts_per_token"] = small["num_experts_per_tok"]
    for key, most in (("first_k_dense_replace", 1), ("n_shared_experts", 2), ("decoder_sparse_step", 2)):
        if hf_config.get(key) is not None:
            small[key] = min(most, hf_config[key])
    if dense := hf_config.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0] if 0 in dense else [2]
    return small
