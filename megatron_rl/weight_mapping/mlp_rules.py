"""Rows of the MLP of one layer: dense, or a router with experts and perhaps a shared expert."""

from dataclasses import dataclass

import torch

from megatron_rl.weight_mapping.architecture import MixtureOfExperts, ModelArchitecture
from megatron_rl.weight_mapping.naming import LAYER, NamingScheme
from megatron_rl.weight_mapping.param_mappings import GateUp, InterleavedGateUp, ParamMapping, Single, Transposed
from megatron_rl.weight_mapping.parameter import Role
from megatron_rl.weight_mapping.rules import HF_LAYER, MappingRule
from megatron_rl.weight_mapping.sharding import Split


@dataclass(frozen=True)
class ExpertNames:
    """How a family calls router and experts within a layer."""

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts.{expert}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts."


def dense_mlp_rules(model: ModelArchitecture, spelling: NamingScheme) -> list[MappingRule]:
    """Norm and MLP of the layers without experts."""
    layers, mlp = model.dense_layers, HF_LAYER + "mlp."
    norm = (HF_LAYER + "post_attention_layernorm.weight",)
    fc1, fc2 = mlp_kinds(model.ffn_hidden_size, model.hidden_size)
    gate_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    return [
        MappingRule(LAYER + spelling.dense_mlp_norm, norm, Single((model.hidden_size,)), Role.NORM, layers=layers),
        MappingRule(LAYER + "mlp.linear_fc1.weight", gate_up, fc1, Role.MLP, layers=layers),
        MappingRule(LAYER + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), fc2, Role.MLP, layers=layers),
    ]


def router_rules(
    model: ModelArchitecture, moe: MixtureOfExperts, spelling: NamingScheme, names: ExpertNames
) -> list[MappingRule]:
    """Norm and router of the sparse layers."""
    count, layers = moe.num_experts, moe.layers

    def row(megatron: str, hf: str, kind: ParamMapping, role: Role, dtype: torch.dtype | None = None) -> MappingRule:
        return MappingRule(LAYER + megatron, (HF_LAYER + hf,), kind, role, layers=layers, dtype=dtype)

    rows = [
        row(spelling.sparse_mlp_norm, "post_attention_layernorm.weight", Single((model.hidden_size,)), Role.NORM),
        row("mlp.router.weight", names.router + ".weight", Single((count, model.hidden_size)), Role.ROUTER),
    ]
    if model.linear_biases:
        rows.append(row("mlp.router.bias", names.router + ".bias", Single((count,)), Role.BIAS))
    if moe.selection_bias:
        rows.append(row("mlp.router.expert_bias", names.selection_bias, Single((count,)), Role.SELECTION_BIAS, torch.float32))
    return rows


def expert_rules(
    model: ModelArchitecture, moe: MixtureOfExperts, spelling: NamingScheme, names: ExpertNames
) -> list[MappingRule]:
    """Experts with tensors of their own, and the shared expert."""
    layers, hidden = moe.layers, model.hidden_size
    fc1, fc2 = mlp_kinds(moe.ffn_hidden_size, hidden)
    expert = HF_LAYER + names.experts
    gate_up = (f"{expert}{names.gate}.weight", f"{expert}{names.up}.weight")
    down = (f"{expert}{names.down}.weight",)
    rows = [
        MappingRule(LAYER + spelling.expert_fc1, gate_up, fc1, Role.EXPERT, layers=layers, num_experts=moe.num_experts),
        MappingRule(LAYER + spelling.expert_fc2, down, fc2, Role.EXPERT, layers=layers, num_experts=moe.num_experts),
    ]
    if moe.shared_ffn_hidden_size:
        fc1, fc2 = mlp_kinds(moe.shared_ffn_hidden_size, hidden)
        shared = HF_LAYER + names.shared
        gate_up = (shared + "gate_proj.weight", shared + "up_proj.weight")
        rows += [
            MappingRule(LAYER + "mlp.shared_experts.linear_fc1.weight", gate_up, fc1, Role.MLP, layers=layers),
            MappingRule(
                LAYER + "mlp.shared_experts.linear_fc2.weight", (shared + "down_proj.weight",), fc2, Role.MLP, layers=layers
            ),
        ]
    return rows


def stacked_expert_rules(model: ModelArchitecture, moe: MixtureOfExperts, spelling: NamingScheme) -> list[MappingRule]:
    """All experts of a layer in one tensor, transposed, gate and up in turn, with biases (GPT-OSS)."""
    hidden, width = model.hidden_size, moe.ffn_hidden_size

    def row(megatron: str, hf: str, kind: ParamMapping, role: Role) -> MappingRule:
        return MappingRule(
            LAYER + megatron, (HF_LAYER + "mlp.experts." + hf,), kind, role, layers=moe.layers, num_experts=moe.num_experts
        )

    return [
        row(spelling.expert_fc1, "gate_up_proj", InterleavedGateUp(width, hidden), Role.EXPERT),
        row(spelling.bias_of(spelling.expert_fc1), "gate_up_proj_bias", InterleavedGateUp(width, None), Role.BIAS),
        row(spelling.expert_fc2, "down_proj", Transposed((hidden, width), Split(1)), Role.EXPERT),
        row(spelling.bias_of(spelling.expert_fc2), "down_proj_bias", Single((hidden,)), Role.BIAS),
    ]


def mlp_kinds(width: int, hidden: int) -> tuple[GateUp, Single]:
    """Kinds of the two linears of a gated MLP: [2 * width, hidden] and [hidden, width]."""
    return GateUp(width, hidden), Single((hidden, width), Split(1))
