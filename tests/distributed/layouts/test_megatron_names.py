"""The names and shapes that the placement predicts are those that Megatron-Core builds, on every rank of every layout.

One process plays all ranks in turn: torch's fake process group gives Megatron a rank and a world size without any partner, and
building a model communicates nothing. Values, and the names of Transformer Engine's modules, are not shown here.
"""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.layouts import ModelArchitecture, ParameterTable, Placement
from megatron_rl.topology import Layout

MODELS = json.loads((Path(__file__).parents[2] / "data" / "small_models.json").read_text())
LAYOUTS = [
    Layout(),
    Layout(world_size=4, tp=4),  # more than the query groups of two of the models
    Layout(world_size=4, pp=4),
    Layout(world_size=2, pp=2, vpp=2),
    Layout(world_size=4, tp=2, cp=2),
    Layout(world_size=4, ep=4),
    Layout(world_size=4, tp=2, etp=2, ep=2),
    Layout(world_size=4, tp=4, etp=2, ep=2),
    Layout(world_size=8, tp=2, pp=2, ep=2, vpp=2),
]
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS if "moe" in name or layout.ep == layout.etp == 1]
Shapes = dict[tuple[int, str], tuple[int, ...]]


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """The stand-in for CUDA changes torch for the whole process, so that it has one of its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_every_rank_builds_what_the_placement_says(other_process: ProcessPoolExecutor, model: str, layout: Layout) -> None:
    placement = place(model, layout)
    built = other_process.submit(built_by_megatron, model, layout).result()
    for rank in range(layout.world_size):
        assert built[rank] == {key: held.shape for key, held in placement.held_by(rank).items()}


def place(model: str, layout: Layout) -> Placement:
    padded = layout.padded_vocab_size(MODELS[model]["vocab_size"])
    return Placement(ParameterTable(MODELS[model], padded_vocab_size=padded), layout)


def built_by_megatron(model: str, layout: Layout) -> list[Shapes]:
    """Shape of each parameter by (chunk, name), for each rank."""
    table = place(model, layout).table
    vocab_size = table["embedding.word_embeddings.weight"].shape[0]
    found: list[Shapes] = []
    for rank in range(layout.world_size):
        with megatron_as(layout, rank):
            settings = transformer_config(table.architecture, layout)
            chunks = [build_chunk(table.architecture, settings, vocab_size, layout, number) for number in range(layout.vpp)]
            found.append(
                {(number, name): tuple(p.shape) for number, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
            )
    return found


@contextmanager
def megatron_as(layout: Layout, rank: int) -> Iterator[None]:
    """Megatron's process groups as they are on one rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rl.engine import cpu

    cpu.install()
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def transformer_config(model: ModelArchitecture, layout: Layout) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = {}
    if model.moe:
        experts = {
            "num_moe_experts": model.moe.num_experts,
            "moe_router_topk": model.moe.top_k,
            "moe_ffn_hidden_size": model.moe.ffn_hidden_size,
            "moe_layer_freq": model.moe_layer_freq,
            "moe_token_dispatcher_type": "alltoall",
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.attention.num_heads,
        num_query_groups=model.attention.num_query_groups,
        kv_channels=model.attention.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        qk_layernorm=model.attention.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        **experts,
    )


def build_chunk(model: ModelArchitecture, settings: Any, vocab_size: int, layout: Layout, number: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_rl.engine.attention import PackedAttention

    stage = number if layout.vpp > 1 else None
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(
        settings,
        spec,
        vocab_size=vocab_size,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        vp_stage=stage,
    )
