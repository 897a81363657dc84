"""Mapping rules of the MLP of one layer: dense, or a router with experts and an optional shared expert."""

from dataclasses import dataclass

import torch

from megatron_rl.weight_mapping.architecture import MixtureOfExperts, ModelArchitecture
from megatron_rl.weight_mapping.naming import LAYER, NamingScheme
from megatron_rl.weight_mapping.param_mappings import (
    DirectMapping,
    GateUpMapping,
    InterleavedGateUpMapping,
    ParamMapping,
    TransposedMapping,
)
from megatron_rl.weight_mapping.parameter import Role
from megatron_rl.weight_mapping.rules import HF_LAYER, MappingRule
from megatron_rl.weight_mapping.sharding import Split


@dataclass(frozen=True)
class ExpertNames:
    """Hugging Face names of router and experts within a layer."""

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts.{expert}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts."


def dense_mlp_rules(model: ModelArchitecture, naming: NamingScheme) -> list[MappingRule]:
    """Norm and MLP of the layers without experts."""
    layers, mlp = model.dense_layers, HF_LAYER + "mlp."
    norm = (HF_LAYER + "post_attention_layernorm.weight",)
    fc1, fc2 = mlp_mappings(model.ffn_hidden_size, model.hidden_size)
    gate_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    return [
        MappingRule(LAYER + naming.dense_mlp_norm, norm, DirectMapping((model.hidden_size,)), Role.NORM, layers=layers),
        MappingRule(LAYER + "mlp.linear_fc1.weight", gate_up, fc1, Role.MLP, layers=layers),
        MappingRule(LAYER + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), fc2, Role.MLP, layers=layers),
    ]


def router_rules(model: ModelArchitecture, moe: MixtureOfExperts, naming: NamingScheme, names: ExpertNames) -> list[MappingRule]:
    """Norm and router of the sparse layers."""
    count, layers = moe.num_experts, moe.layers

    def rule(megatron: str, hf: str, mapping: ParamMapping, role: Role, dtype: torch.dtype | None = None) -> MappingRule:
        return MappingRule(LAYER + megatron, (HF_LAYER + hf,), mapping, role, layers=layers, dtype=dtype)

    rules = [
        rule(naming.sparse_mlp_norm, "post_attention_layernorm.weight", DirectMapping((model.hidden_size,)), Role.NORM),
        rule("mlp.router.weight", names.router + ".weight", DirectMapping((count, model.hidden_size)), Role.ROUTER),
    ]
    if model.linear_biases:
        rules.append(rule("mlp.router.bias", names.router + ".bias", DirectMapping((count,)), Role.BIAS))
    if moe.selection_bias:
        rules.append(
            rule("mlp.router.expert_bias", names.selection_bias, DirectMapping((count,)), Role.SELECTION_BIAS, torch.float32)
        )
    return rules


def expert_rules(model: ModelArchitecture, moe: MixtureOfExperts, naming: NamingScheme, names: ExpertNames) -> list[MappingRule]:
    """Experts with one Hugging Face tensor per expert and matrix, and the shared expert."""
    layers, hidden = moe.layers, model.hidden_size
    fc1, fc2 = mlp_mappings(moe.ffn_hidden_size, hidden)
    expert = HF_LAYER + names.experts
    gate_up = (f"{expert}{names.gate}.weight", f"{expert}{names.up}.weight")
    down = (f"{expert}{names.down}.weight",)
    rules = [
        MappingRule(LAYER + naming.expert_fc1, gate_up, fc1, Role.EXPERT, layers=layers, num_experts=moe.num_experts),
        MappingRule(LAYER + naming.expert_fc2, down, fc2, Role.EXPERT, layers=layers, num_experts=moe.num_experts),
    ]
    if moe.shared_ffn_hidden_size:
        fc1, fc2 = mlp_mappings(moe.shared_ffn_hidden_size, hidden)
        shared = HF_LAYER + names.shared
        gate_up = (shared + "gate_proj.weight", shared + "up_proj.weight")
        rules += [
            MappingRule(LAYER + "mlp.shared_experts.linear_fc1.weight", gate_up, fc1, Role.MLP, layers=layers),
            MappingRule(
                LAYER + "mlp.shared_experts.linear_fc2.weight", (shared + "down_proj.weight",), fc2, Role.MLP, layers=layers
            ),
        ]
    return rules


def stacked_expert_rules(model: ModelArchitecture, moe: MixtureOfExperts, naming: NamingScheme) -> list[MappingRule]:
    """All experts of a layer in one Hugging Face tensor, transposed, gate and up interleaved, with biases (GPT-OSS)."""
    hidden, width = model.hidden_size, moe.ffn_hidden_size

    def rule(megatron: str, hf: str, mapping: ParamMapping, role: Role) -> MappingRule:
        return MappingRule(
            LAYER + megatron, (HF_LAYER + "mlp.experts." + hf,), mapping, role, layers=moe.layers, num_experts=moe.num_experts
        )

    return [
        rule(naming.expert_fc1, "gate_up_proj", InterleavedGateUpMapping(width, hidden), Role.EXPERT),
        rule(naming.bias_of(naming.expert_fc1), "gate_up_proj_bias", InterleavedGateUpMapping(width, None), Role.BIAS),
        rule(naming.expert_fc2, "down_proj", TransposedMapping((hidden, width), Split(1)), Role.EXPERT),
        rule(naming.bias_of(naming.expert_fc2), "down_proj_bias", DirectMapping((hidden,)), Role.BIAS),
    ]


def mlp_mappings(width: int, hidden: int) -> tuple[GateUpMapping, DirectMapping]:
    """Mappings of the two linear layers of a gated MLP: [2 * width, hidden] and [hidden, width]."""
    return GateUpMapping(width, hidden), DirectMapping((hidden, width), Split(1))
