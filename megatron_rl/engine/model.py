"""The policy: Megatron-Core's GPTModel, built from a ModelArchitecture and the run's configuration."""

import dataclasses
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.norm import RMSNorm
from megatron_rl.layouts import CHECKPOINT, LOCAL, TRANSFORMER_ENGINE, ModelArchitecture, Placement, Spelling
from megatron_rl.layouts.sharding import Split

logger = logging.getLogger(__name__)


class UnsupportedModelError(ValueError):
    """This combination of model, layout and machine cannot be built."""


class PolicyModel(GPTModel):
    """A GPTModel whose last stage ends in hidden states: the head turns them into log-probabilities and never into logits.

    The output layer's weight is a parameter as in any GPTModel, and is used by the head alone.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states  # [N, 1, hidden]; with sequence parallelism this rank's slice of N

    @property
    def output_weight(self) -> Tensor:
        """[padded vocabulary / tp, hidden]; the embedding's weight where the two are tied."""
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer.weight if tied is None else tied


@dataclass(frozen=True)
class Backend:
    """Whose modules the layers are made of. Chosen once, by what the machine has."""

    transformer_engine: bool
    apex_gradient_fusion: bool

    @classmethod
    def of(cls, device: torch.device) -> "Backend":
        if device.type != "cuda":
            return cls(transformer_engine=False, apex_gradient_fusion=False)
        found = {name: importlib.util.find_spec(name) is not None for name in ("transformer_engine", "fused_weight_gradient_mlp_cuda")}
        if not found["transformer_engine"]:
            raise UnsupportedModelError("training on a GPU needs Transformer Engine: pip install megatron-rl[gpu]")
        return cls(transformer_engine=True, apex_gradient_fusion=found["fused_weight_gradient_mlp_cuda"])

    @property
    def spelling(self) -> Spelling:
        return TRANSFORMER_ENGINE if self.transformer_engine else LOCAL

    def describe(self) -> str:
        return (
            f"layers: {'Transformer Engine' if self.transformer_engine else 'PyTorch'}; grouped expert products: "
            f"{'on' if self.transformer_engine else 'off'}; apex's fused gradient accumulation: {'on' if self.apex_gradient_fusion else 'off'}"
        )


def transformer_config(model: ModelArchitecture, config: Config, backend: Backend) -> TransformerConfig:
    """Megatron's configuration. The loss is a sum that is divided by nothing on its way (`calculate_per_token_loss`)."""
    check_supported(model, config)
    dtype = getattr(torch, config.model.dtype)
    return TransformerConfig(
        num_layers=model.num_layers, hidden_size=model.hidden_size, ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.attention.num_heads, num_query_groups=model.attention.num_query_groups,
        kv_channels=model.attention.head_dim, qk_layernorm=model.attention.qk_norm, normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype is torch.bfloat16,
        # Weights come from a checkpoint or are drawn by name: Megatron's own initialisation would depend on the layout.
        perform_initialization=False, use_cpu_initialization=not backend.transformer_engine,
        calculate_per_token_loss=True, deterministic_mode=config.run.deterministic,
        bias_activation_fusion=backend.transformer_engine, gradient_accumulation_fusion=backend.apex_gradient_fusion,
        **_parallel_settings(config), **_expert_settings(model, backend), **_recompute_settings(model, config),
    )  # fmt: skip


def check_supported(model: ModelArchitecture, config: Config) -> None:
    """UnsupportedModelError for what Megatron would refuse in the middle of a step, or compute wrongly."""
    layout = config.parallel
    if layout.cp > 1:
        raise UnsupportedModelError(f"layout.context = {layout.cp}: context parallelism is not built; set it to 1")
    if model.moe and layout.tp > 1 and not config.sequence_parallel:
        raise UnsupportedModelError("layout.sequence_parallel = false: Megatron-Core needs it for experts with layout.tensor > 1")


def _parallel_settings(config: Config) -> dict[str, Any]:
    layout = config.parallel
    return dict(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp, sequence_parallel=config.sequence_parallel,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        # Packed microbatches differ in length, so that stages tell one another the shapes.
        variable_seq_lengths=layout.pp > 1, deallocate_pipeline_outputs=layout.pp > 1,
        # With two interleaved stages the batched exchange sends to and receives from the same rank, and pairs the messages wrongly
        # without a word: gradients are off by orders of magnitude.
        batch_p2p_comm=layout.vpp == 1, overlap_p2p_comm=layout.vpp > 1,
    )  # fmt: skip


def _expert_settings(model: ModelArchitecture, backend: Backend) -> dict[str, Any]:
    if model.moe is None:
        return dict(moe_token_dispatcher_type="alltoall")  # unused; with the default Megatron refuses stages of packed sequences
    return dict(
        num_moe_experts=model.moe.num_experts, moe_ffn_hidden_size=model.moe.ffn_hidden_size, moe_router_topk=model.moe.top_k,
        moe_layer_freq=model.moe_layer_freq, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall", moe_grouped_gemm=backend.transformer_engine,
        # Softmax over all experts and then top-k where the chosen probabilities are used as they are; over the chosen alone is the
        # same as dividing by their sum. The router's product is in the model's dtype, as in vLLM and Hugging Face, softmax in fp32.
        moe_router_pre_softmax=not model.moe.normalize_top_k, moe_router_dtype=None,
    )  # fmt: skip


def _recompute_settings(model: ModelArchitecture, config: Config) -> dict[str, Any]:
    if config.trainer.recompute == "full":
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if config.trainer.recompute == "selective":
        modules = ["core_attn"] + (["moe"] if model.moe else [])
        return dict(recompute_granularity="selective", recompute_modules=modules)
    return {}


def build_chunks(
    model: ModelArchitecture, config: Config, groups: ParallelGroups, backend: Backend, *, padded_vocab_size: int
) -> list[PolicyModel]:
    """This rank's chunks of the model, their weights not yet filled; one chunk unless stages are interleaved."""
    settings = transformer_config(model, config, backend)
    return [_build_chunk(model, config, settings, groups, backend, padded_vocab_size, chunk) for chunk in range(groups.layout.vpp)]


def _build_chunk(
    model: ModelArchitecture, config: Config, settings: TransformerConfig, groups: ParallelGroups, backend: Backend, vocab_size: int, chunk: int
) -> PolicyModel:
    vp_stage = chunk if groups.layout.vpp > 1 else None
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=backend.transformer_engine, normalization="RMSNorm", vp_stage=vp_stage)
    rope = model.rope
    built = PolicyModel(
        settings, spec if backend.transformer_engine else _with_cpu_modules(spec), vocab_size=vocab_size,
        max_sequence_length=config.model.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope", rotary_base=rope.theta, rope_scaling=rope.kind == "llama3", rope_scaling_factor=rope.factor,
        seq_len_interpolation_factor=rope.factor if rope.kind == "linear" else None,
        share_embeddings_and_output_weights=model.tie_word_embeddings, parallel_output=True, vp_stage=vp_stage,
    )  # fmt: skip
    _name_as_in_checkpoints(built, backend.spelling)
    return built.to(groups.device)


def _name_as_in_checkpoints(chunk: PolicyModel, spelling: Spelling) -> None:
    """Layers of either spec save and load under the same keys, so that checkpoints move between CPU and GPU."""
    for layer in chunk.decoder.layers:
        mlp_norm = "sparse_mlp_norm" if hasattr(layer.mlp, "router") else "dense_mlp_norm"
        keys = {getattr(spelling, field): getattr(CHECKPOINT, field) for field in ("attention_norm", mlp_norm)}
        layer.submodules_config = dataclasses.replace(layer.submodules_config, sharded_state_dict_keys_map=keys)


def _with_cpu_modules(spec: Any) -> Any:
    """A layer spec with the norms and the core attention that work on a CPU."""
    if spec is WrappedTorchNorm:
        return RMSNorm
    if isinstance(spec, list):
        return [_with_cpu_modules(part) for part in spec]
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    names = [field.name for field in dataclasses.fields(spec)]
    replaced = {name: PackedAttention if name == "core_attention" else _with_cpu_modules(getattr(spec, name)) for name in names}
    return dataclasses.replace(spec, **replaced)


def mark_parameters(chunks: list[PolicyModel], placement: Placement, rank: int) -> None:
    """Tell Megatron which parameters are experts' and which are cut over tensor-parallel ranks; before DDP is built.

    Experts: 0.16.1 decides by ep > 1 alone; with ep = 1 and tp != etp it reduces their gradients over the wrong group, silently.
    Cut: Megatron notes it where it initialises a weight, which it does not do here. Without the mark the gradient norm
    leaves out all ranks but the first.
    """
    for (chunk, name), held in placement.held_by(rank).items():
        parameter, sharding = chunks[chunk].get_parameter(name), held.parameter.kind.sharding
        if held.parameter.is_expert:
            parameter.allreduce = False
        if isinstance(sharding, Split) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=sharding.dim, stride=sharding.sections)


def wrap_for_training(chunks: list[PolicyModel]) -> list[DistributedDataParallel]:
    """Gradients in fp32 buffers, summed (not averaged) over the data-parallel ranks."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [
        # Chunks after the first are not bucketed: their communication is not on the critical path.
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
