"""Rows of the MLP of one layer: dense, or a router with experts and perhaps a shared expert."""

from dataclasses import dataclass

import torch

from megatron_rl.layouts.architecture import MixtureOfExperts, ModelArchitecture
from megatron_rl.layouts.kinds import GateUp, InterleavedGateUp, Kind, Single, Transposed
from megatron_rl.layouts.parameter import Role
from megatron_rl.layouts.rows import HF_LAYER, Row
from megatron_rl.layouts.sharding import Split
from megatron_rl.layouts.spelling import LAYER, Spelling


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


def dense_mlp_rows(model: ModelArchitecture, spelling: Spelling) -> list[Row]:
    """Norm and MLP of the layers without experts."""
    layers, mlp = model.dense_layers, HF_LAYER + "mlp."
    norm = (HF_LAYER + "post_attention_layernorm.weight",)
    fc1, fc2 = mlp_kinds(model.ffn_hidden_size, model.hidden_size)
    gate_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    return [
        Row(LAYER + spelling.dense_mlp_norm, norm, Single((model.hidden_size,)), Role.NORM, layers=layers),
        Row(LAYER + "mlp.linear_fc1.weight", gate_up, fc1, Role.MLP, layers=layers),
        Row(LAYER + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), fc2, Role.MLP, layers=layers),
    ]


def router_rows(model: ModelArchitecture, moe: MixtureOfExperts, spelling: Spelling, names: ExpertNames) -> list[Row]:
    """Norm and router of the sparse layers."""
    count, layers = moe.num_experts, moe.layers

    def row(megatron: str, hf: str, kind: Kind, role: Role, dtype: torch.dtype | None = None) -> Row:
        return Row(LAYER + megatron, (HF_LAYER + hf,), kind, role, layers=layers, dtype=dtype)

    rows = [
        row(spelling.sparse_mlp_norm, "post_attention_layernorm.weight", Single((model.hidden_size,)), Role.NORM),
        row("mlp.router.weight", names.router + ".weight", Single((count, model.hidden_size)), Role.ROUTER),
    ]
    if model.linear_biases:
        rows.append(row("mlp.router.bias", names.router + ".bias", Single((count,)), Role.BIAS))
    if moe.selection_bias:
        rows.append(row("mlp.router.expert_bias", names.selection_bias, Single((count,)), Role.SELECTION_BIAS, torch.float32))
    return rows


def expert_rows(model: ModelArchitecture, moe: MixtureOfExperts, spelling: Spelling, names: ExpertNames) -> list[Row]:
    """Experts with tensors of their own, and the shared expert."""
    layers, hidden = moe.layers, model.hidden_size
    fc1, fc2 = mlp_kinds(moe.ffn_hidden_size, hidden)
    expert = HF_LAYER + names.experts
    gate_up = (f"{expert}{names.gate}.weight", f"{expert}{names.up}.weight")
    down = (f"{expert}{names.down}.weight",)
    rows = [
        Row(LAYER + spelling.expert_fc1, gate_up, fc1, Role.EXPERT, layers=layers, num_experts=moe.num_experts),
        Row(LAYER + spelling.expert_fc2, down, fc2, Role.EXPERT, layers=layers, num_experts=moe.num_experts),
    ]
    if moe.shared_ffn_hidden_size:
        fc1, fc2 = mlp_kinds(moe.shared_ffn_hidden_size, hidden)
        shared = HF_LAYER + names.shared
        gate_up = (shared + "gate_proj.weight", shared + "up_proj.weight")
        rows += [
            Row(LAYER + "mlp.shared_experts.linear_fc1.weight", gate_up, fc1, Role.MLP, layers=layers),
            Row(LAYER + "mlp.shared_experts.linear_fc2.weight", (shared + "down_proj.weight",), fc2, Role.MLP, layers=layers),
        ]
    return rows


def stacked_expert_rows(model: ModelArchitecture, moe: MixtureOfExperts, spelling: Spelling) -> list[Row]:
    """All experts of a layer in one tensor, transposed, gate and up in turn, with biases (GPT-OSS)."""
    hidden, width = model.hidden_size, moe.ffn_hidden_size

    def row(megatron: str, hf: str, kind: Kind, role: Role) -> Row:
        return Row(LAYER + megatron, (HF_LAYER + "mlp.experts." + hf,), kind, role, layers=moe.layers, num_experts=moe.num_experts)

    return [
        row(spelling.expert_fc1, "gate_up_proj", InterleavedGateUp(width, hidden), Role.EXPERT),
        row(spelling.bias_of(spelling.expert_fc1), "gate_up_proj_bias", InterleavedGateUp(width, None), Role.BIAS),
        row(spelling.expert_fc2, "down_proj", Transposed((hidden, width), Split(1)), Role.EXPERT),
        row(spelling.bias_of(spelling.expert_fc2), "down_proj_bias", Single((hidden,)), Role.BIAS),
    ]


def mlp_kinds(width: int, hidden: int) -> tuple[GateUp, Single]:
    """Kinds of the two linears of a gated MLP: [2 * width, hidden] and [hidden, width]."""
    return GateUp(width, hidden), Single((hidden, width), Split(1))
