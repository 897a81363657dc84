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
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.engine.architecture_settings import (
    attention_settings,
    expert_settings,
    gate_settings,
    rope_arguments,
    yarn_attributes,
)
from megatron_rl.engine.attention import PackedAttention
from megatron_rl.engine.deterministic_attention import check_deterministic_attention, has_flash_attention
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.groups import ParallelGroups
from megatron_rl.engine.latent_attention import DOWN_PROJECTIONS, ReplicatedLinear, accept_plain_queries, accept_replicated_linear
from megatron_rl.engine.megatron_types import megatron_attributes
from megatron_rl.engine.mtp import hidden_states_ahead, mtp_settings, mtp_spec, prepare_layers, transformer_layers
from megatron_rl.engine.native_fp4 import native_fp4_settings
from megatron_rl.engine.norm import RMSNorm
from megatron_rl.engine.optimizers import OPTIMIZERS
from megatron_rl.engine.parameters import tensor_of
from megatron_rl.weight_mapping import (
    CHECKPOINT,
    LOCAL,
    TRANSFORMER_ENGINE,
    GroupedQueryAttention,
    LatentAttention,
    ModelArchitecture,
    NamingScheme,
    Placement,
)
from megatron_rl.weight_mapping.sharding import Split

logger = logging.getLogger(__name__)


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns hidden states: the head turns them into log-probabilities without logits.

    The output layer's weight is a parameter as in any GPTModel, and only the head uses it.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states  # [N, 1, hidden]; with sequence parallelism this rank's slice of N

    @property
    def num_outputs(self) -> int:
        """Hidden states that a training pass gives for each position."""
        return 1

    @property
    def output_weight(self) -> Tensor:
        """[padded vocabulary / tp, hidden]; the embedding's weight where the two are tied."""
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer.weight if tied is None else tied


class PolicyModelWithMtp(PolicyModel):
    """Training passes also give the hidden states of the layers for multi-token prediction, after the policy's own."""

    def _postprocess(self, hidden_states: Tensor, **given: Any) -> Tensor:
        if not (self.mtp_process and self.training):
            return hidden_states
        rotary = {name: given[name] for name in ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")}
        return hidden_states_ahead(
            self, hidden_states, given["input_ids"], given["position_ids"], given["packed_seq_params"], rotary
        )

    @property
    def num_outputs(self) -> int:
        """The policy's hidden states and those of each layer."""
        return 1 + self.config.mtp_num_layers


@dataclass(frozen=True)
class Backend:
    """Which library's modules the layers are made of. Chosen once, by what the machine has."""

    transformer_engine: bool
    apex_gradient_fusion: bool

    @classmethod
    def of(cls, device: torch.device) -> "Backend":
        """The backend of this machine.

        Raises:
            UnsupportedModelError: A GPU without Transformer Engine.
        """
        if device.type != "cuda":
            return cls(transformer_engine=False, apex_gradient_fusion=False)
        found = {
            name: importlib.util.find_spec(name) is not None for name in ("transformer_engine", "fused_weight_gradient_mlp_cuda")
        }
        if not found["transformer_engine"]:
            raise UnsupportedModelError("training on a GPU needs Transformer Engine; `bash scripts/setup.sh --gpu` installs it")
        return cls(transformer_engine=True, apex_gradient_fusion=found["fused_weight_gradient_mlp_cuda"])

    @property
    def naming(self) -> NamingScheme:
        """Megatron's names of the layers' parameters."""
        return TRANSFORMER_ENGINE if self.transformer_engine else LOCAL

    def describe(self) -> str:
        """A description for the log."""
        fused, accumulation = ("on" if on else "off" for on in (self.transformer_engine, self.apex_gradient_fusion))
        layers = "Transformer Engine" if self.transformer_engine else "PyTorch"
        return f"layers: {layers}; grouped expert products: {fused}; apex's fused gradient accumulation: {accumulation}"


def transformer_config(model: ModelArchitecture, config: Config, backend: Backend) -> TransformerConfig:
    """Megatron's configuration. The loss is a sum that Megatron does not divide (`calculate_per_token_loss`).

    Raises:
        UnsupportedModelError: Megatron would refuse the model in the middle of a step, or compute it wrongly.
    """
    check_supported(model, config, backend)
    dtype = getattr(torch, config.model.dtype)
    kind = MLATransformerConfig if isinstance(model.attention, LatentAttention) else TransformerConfig
    settings = kind(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        **attention_settings(model),
        **gate_settings(model),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights come from a checkpoint or depend on their names: Megatron's own initialisation would depend on the layout.
        perform_initialization=False,
        use_cpu_initialization=not backend.transformer_engine,
        **OPTIMIZERS[config.optimizer.name].model_settings(config),
        calculate_per_token_loss=True,
        deterministic_mode=config.run.deterministic,
        bias_activation_fusion=backend.transformer_engine,
        gradient_accumulation_fusion=backend.apex_gradient_fusion,
        **_parallel_settings(config),
        **expert_settings(model, grouped_products=backend.transformer_engine),
        **mtp_settings(model, trained=config.model.mtp == "trained"),
        **_recompute_settings(model, config),
        **native_fp4_settings(config.precision, has_transformer_engine=backend.transformer_engine),
    )
    for name, value in yarn_attributes(model.rope).items():
        setattr(settings, name, value)
    return settings


def check_supported(model: ModelArchitecture, config: Config, backend: Backend) -> None:
    """Raise UnsupportedModelError for what Megatron would refuse in the middle of a step, or compute wrongly."""
    layout = config.parallel_layout
    if model.moe and layout.tp > 1 and not config.sequence_parallel:
        raise UnsupportedModelError(
            "layout.sequence_parallel = false: Megatron-Core needs it for experts with layout.tensor > 1; remove the key"
        )
    OPTIMIZERS[config.optimizer.name].check_model(model, config)
    if isinstance(model.attention, LatentAttention) and layout.tp > 1 and not config.sequence_parallel:
        raise UnsupportedModelError(
            "layout.sequence_parallel = false: latent attention needs it with layout.tensor > 1; remove the key"
        )
    heads = model.attention
    special = isinstance(heads, GroupedQueryAttention) and (heads.sinks or heads.windowed_layers)
    if layout.cp > 1 and backend.transformer_engine and special:
        raise UnsupportedModelError(
            f"layout.context = {layout.cp}: Transformer Engine's attention over several ranks supports neither sinks nor windows "
            "for packed sequences; set it to 1"
        )
    if model.moe and model.linear_biases and layout.etp > 1:
        raise UnsupportedModelError(
            f"layout.expert_tensor = {layout.etp}: Megatron-Core supports biases of experts only with 1; set it to 1"
        )


def _parallel_settings(config: Config) -> dict[str, Any]:
    layout = config.parallel_layout
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "cp_comm_type": "p2p",  # on a GPU: keys and values are passed around the ranks in a ring while attention is computed
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": config.sequence_parallel,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        # Packed microbatches differ in length, so that stages send one another the shapes.
        "variable_seq_lengths": layout.pp > 1,
        "deallocate_pipeline_outputs": layout.pp > 1,
        # With two interleaved stages the batched exchange sends to and receives from the same rank, and silently pairs the
        # messages wrongly: gradients are off by orders of magnitude.
        "batch_p2p_comm": layout.vpp == 1,
        "overlap_p2p_comm": layout.vpp > 1,
    }


def _recompute_settings(model: ModelArchitecture, config: Config) -> dict[str, Any]:
    if config.trainer.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.trainer.recompute == "selective":
        modules = ["core_attn"] + (["moe"] if model.moe else [])
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def build_chunks(
    model: ModelArchitecture, config: Config, groups: ParallelGroups, backend: Backend, *, padded_vocab_size: int
) -> list[PolicyModel]:
    """Build this rank's chunks of the model, their weights not yet filled.

    Args:
        model: What the model is.
        config: The run's configuration.
        groups: This rank's process groups.
        backend: Which library's modules the layers are made of.
        padded_vocab_size: Rows of the embedding over all tensor-parallel ranks.

    Returns:
        One chunk unless stages are interleaved.

    Raises:
        UnsupportedModelError: Megatron-Core cannot train this model at this layout on this machine.
    """
    settings = transformer_config(model, config, backend)
    if groups.device.type == "cuda":
        capability = torch.cuda.get_device_capability(groups.device)
        check_deterministic_attention(config, model, capability, has_flash_attention=has_flash_attention())
    if groups.rank == 0:
        logger.info("%s", backend.describe())
        if model.num_mtp_layers:
            use = "trained by their own loss" if config.model.mtp == "trained" else "not built, exports contain them unchanged"
            logger.info(
                "layers for multi-token prediction: %d, %s (model.mtp = '%s')", model.num_mtp_layers, use, config.model.mtp
            )
    if isinstance(model.attention, LatentAttention):
        accept_plain_queries()
    if not backend.transformer_engine:
        accept_replicated_linear()
    return [
        _build_chunk(model, config, settings, groups, backend, padded_vocab_size, chunk) for chunk in range(groups.layout.vpp)
    ]


def _build_chunk(
    model: ModelArchitecture,
    config: Config,
    settings: TransformerConfig,
    groups: ParallelGroups,
    backend: Backend,
    vocab_size: int,
    chunk: int,
) -> PolicyModel:
    vp_stage = chunk if groups.layout.vpp > 1 else None
    spec = get_gpt_decoder_block_spec(
        settings, use_transformer_engine=backend.transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    ahead = mtp_spec(settings, spec, transformer_engine=backend.transformer_engine, vp_stage=vp_stage)
    if not backend.transformer_engine:
        spec, ahead = (_with_modules(part, _cpu_modules(model)) for part in (spec, ahead))
    built = (PolicyModelWithMtp if settings.mtp_num_layers else PolicyModel)(
        settings,
        spec,
        mtp_block_spec=ahead,
        vocab_size=vocab_size,
        max_sequence_length=config.model.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        **rope_arguments(model),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    if ahead is not None:
        prepare_layers(built)
    _name_as_in_checkpoints(built, backend.naming)
    if model.linear_biases and not backend.transformer_engine:
        _skip_reductions_over_one_rank(built)
    return built.to(groups.device)


def _skip_reductions_over_one_rank(chunk: PolicyModel) -> None:
    """Skip the reduction after an expert's second linear layer.

    Biases of experts are added in place to what linear_fc2 returns, which autograd forbids after a reduction. Over the one rank
    of an expert (it is not cut when it has a bias) the reduction is the identity.
    """
    for layer in transformer_layers(chunk):
        for expert in getattr(getattr(layer.mlp, "experts", None), "local_experts", ()):
            expert.linear_fc2.explicit_expert_comm = True


def _name_as_in_checkpoints(chunk: PolicyModel, naming: NamingScheme) -> None:
    """Layers of either spec save and load under the same keys, so that checkpoints move between CPU and GPU."""
    for layer in transformer_layers(chunk):
        mlp_norm = "sparse_mlp_norm" if hasattr(layer.mlp, "router") else "dense_mlp_norm"
        is_latent = hasattr(layer.self_attention, "linear_kv_up_proj")
        # Only there: another attention's q_layernorm, over each head, goes by the same name and stays where it is.
        attention = ("latent_attention_norm", "latent_q_norm", "latent_kv_norm") if is_latent else ("attention_norm",)
        keys = {getattr(naming, field): getattr(CHECKPOINT, field) for field in (*attention, mlp_norm)}
        layer.submodules_config = dataclasses.replace(layer.submodules_config, sharded_state_dict_keys_map=keys)


def _cpu_modules(model: ModelArchitecture) -> dict[str, type]:
    """What works on a CPU, by the field of the spec: core attention and down projections; no norm of queries that have none."""
    modules: dict[str, type] = {"core_attention": PackedAttention, **dict.fromkeys(DOWN_PROJECTIONS, ReplicatedLinear)}
    if isinstance(model.attention, LatentAttention) and model.attention.q_lora_rank is None:
        modules["q_layernorm"] = IdentityOp
    return modules


def _with_modules(spec: Any, modules: dict[str, type]) -> Any:
    """A layer spec with these modules in its fields, and the norm that works with sequence parallelism on a CPU."""
    if spec is WrappedTorchNorm:
        return RMSNorm
    if isinstance(spec, list):
        return [_with_modules(part, modules) for part in spec]
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    names = [field.name for field in dataclasses.fields(spec)]
    return dataclasses.replace(spec, **{n: modules.get(n) or _with_modules(getattr(spec, n), modules) for n in names})


def mark_parameters(chunks: list[PolicyModel], placement: Placement, rank: int) -> None:
    """Mark for Megatron which parameters are experts' and which are sharded over tensor-parallel ranks; before DDP is built.

    Experts: 0.16.1 decides by ep > 1 alone; with ep = 1 and tp != etp it reduces their gradients over the wrong group, silently.
    Cut: Megatron notes it where it initialises a weight, which it does not do here. Without the mark the gradient norm
    leaves out all ranks but the first.
    """
    for (chunk, name), held in placement.held_by(rank).items():
        parameter, sharding = tensor_of(chunks[chunk], name), held.parameter.mapping.sharding
        if not isinstance(parameter, torch.nn.Parameter):
            continue
        if held.parameter.is_expert:
            attributes = megatron_attributes(parameter)
            attributes.allreduce = False
            attributes.sequence_parallel = False  # biases: a sum over tensor-parallel ranks would mix different experts
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
