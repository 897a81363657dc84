"""A small copy of the user's model and layout, with every feature of both: what the checks run on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config import Config, layout_values
from megatron_rl.records import Sampling
from megatron_rl.topology import Layout
from megatron_rl.weight_mapping.shrink import SmallSizes

NUM_LAYERS = 4
"""One for each chunk of two stages with two chunks."""
NUM_EXPERTS = 8
MAX_TOKENS = 40
"""Largest number of tokens of a sequence and of a microbatch, so that the sequences fill several microbatches."""
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=8)

CHECK_SIZES = SmallSizes(
    fixed={
        "vocab_size": 131,  # odd: with tensor parallelism Megatron's embedding has padded rows
        "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 56, "num_attention_heads": 4, "head_dim": 32,
        "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 18, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "n_routed_experts": NUM_EXPERTS, "sliding_window": 5,
        "max_position_embeddings": 128, "num_hidden_layers": NUM_LAYERS,
    },
    at_most={
        "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_shared_experts": 2, "decoder_sparse_step": 2,
    },
    yarn_positions=32,
)  # fmt: skip
"""Widths are small, differ from one another and form no square matrix: a missing transpose or exchanged parts are noticed."""


def shrunk_layout(layout: Layout) -> Layout:
    """Turns every parallel size above 1 into 2; data parallelism only up to 8 ranks in all.

    A stage of a different size gets one layer.
    """
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
    """Adds ranks until each expert is on two ranks or more: only then are its gradients summed over ranks."""
    while layout.edp == 1:
        if layout.world_size == 8:
            layout = replace(layout, world_size=8 // layout.pp, pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None)
        layout = replace(layout, world_size=2 * layout.world_size)
    return layout


def shrunk_config(config: Config, model: Mapping[str, Any], layout: Layout) -> Config:
    """The user's run with a small model and layout, in fp32 on the CPU, with both replays and without a reference policy.

    NVFP4 is off: the small widths are no multiples of its blocks.

    Args:
        config: The user's run.
        model: config.json of the small model.
        layout: The small layout.
    """
    changes: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu"},
        "model": {"path": None, "architecture": dict(model), "dtype": "float32", "max_sequence_length": MAX_TOKENS},
        "layout": layout_values(layout)
        | {"sequence_parallel": config.layout.sequence_parallel if layout.tp > 1 else None},
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
        "precision": {"training": "full", "rollouts": "full", "activations": "full", "backward": "full"},
        "metrics": {"entropy_full_tokens": 0},
    }  # fmt: skip
    return config.with_values(changes)
