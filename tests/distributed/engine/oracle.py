"""The same step by Hugging Face's own model in float64, one sequence after the other, with the recorded routes and keep-sets."""

from dataclasses import dataclass

import numpy as np
import torch
import transformers
from torch import Tensor

from megatron_rl.batching import Microbatch, alignment_of
from megatron_rl.batching.lay_out import lay_out
from megatron_rl.keep_set import KeepSets, reference_log_probs
from megatron_rl.objective import token_batch
from megatron_rl.topology import Layout
from tests.distributed.engine.cases import by_sequence
from tests.distributed.engine.subject import (
    MODELS,
    all_layers,
    config_of,
    denominators_of,
    loss_of,
    options_of,
    rollouts_of,
    weights_of,
)


@dataclass(frozen=True)
class Expected:
    log_probs: dict[int, np.ndarray]
    entropies: dict[int, np.ndarray]
    gradients: dict[str, Tensor]
    loss: float


def expected(model: str, *, routing_replay: bool = True) -> Expected:
    members = rollouts_of(model)
    options = options_of(model, moe_layers=all_layers(model), routing_replay=routing_replay)
    whole = lay_out(members, 0, alignment_of(Layout(), False), options)
    network = hugging_face(model)
    hidden = torch.cat(
        [_hidden_states(network, whole, start, end) for start, end in zip(whole.segment_ends, whole.segment_ends[1:])]
    )
    log_probs, entropies = reference_log_probs(
        hidden,
        network.lm_head.weight,
        _keep_sets(whole),
        temperature=torch.from_numpy(whole.temperature),
        vocab_size=MODELS[model]["vocab_size"],
    )
    loss, _ = loss_of(config_of(model, Layout()))(
        log_probs, token_batch(whole, denominators_of(members), entropy=entropies.float())
    )
    loss.backward()
    return Expected(
        by_sequence([whole], [log_probs.detach().numpy()]), by_sequence([whole], [entropies.detach().numpy()]),
        _gradients(network),
        float(loss.detach()),
    )  # fmt: skip


def hugging_face(model: str) -> transformers.PreTrainedModel:
    head = MODELS[model]["architectures"][0]
    config = getattr(transformers, head.replace("ForCausalLM", "Config"))(**MODELS[model])
    config._experts_implementation = "eager"  # the grouped product knows no float64
    network = getattr(transformers, head)(config)
    weights, state = weights_of(model), network.state_dict()
    for name in state:
        state[name] = (
            _fused_experts(name, weights, state[name].shape[0])
            if "experts" in name
            else weights.get(name, weights["model.embed_tokens.weight"])
        )
    network.load_state_dict(state)
    return network.double()


def _fused_experts(name: str, weights: dict[str, Tensor], count: int) -> Tensor:
    """transformers keeps the experts of a layer in one tensor, [E, 2 I, H] for gate and up, [E, H, I] for down."""
    prefix, kind = name.rsplit(".", 1)
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
    return torch.stack([torch.cat([weights[f"{prefix}.{n}.{part}.weight"] for part in parts]) for n in range(count)])


def _gradients(network: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Under the names of a checkpoint."""
    found = {}
    for name, parameter in network.named_parameters():
        prefix, kind = name.rsplit(".", 1)
        if kind == "gate_up_proj":
            for n, expert in enumerate(parameter.grad):
                found[f"{prefix}.{n}.gate_proj.weight"], found[f"{prefix}.{n}.up_proj.weight"] = expert.chunk(2)
        elif kind == "down_proj":
            found |= {f"{prefix}.{n}.down_proj.weight": expert for n, expert in enumerate(parameter.grad)}
        else:
            found[name] = parameter.grad
    return found


def _hidden_states(network: transformers.PreTrainedModel, whole: Microbatch, start: int, end: int) -> Tensor:
    """[end - start, H] of one sequence."""
    gates = [layer.mlp.gate for layer in network.model.layers if hasattr(layer.mlp, "gate")]
    for number, gate in enumerate(gates):
        recorded = (
            None if whole.routed_experts is None else (whole.routed_experts[start:end, number], whole.route_mask[start:end])
        )
        gate.forward = _forced(gate, recorded)
    tokens = torch.from_numpy(whole.tokens[start:end])[None]
    return network.model(input_ids=tokens, use_cache=False).last_hidden_state[0]


def _forced(gate: torch.nn.Module, recorded: tuple[np.ndarray, np.ndarray] | None):
    """The gate's own forward, but for the choice: recorded experts, their probabilities from the live router."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        probabilities = logits.softmax(-1)
        experts = probabilities.topk(gate.top_k).indices
        if recorded is not None:
            experts = torch.where(torch.from_numpy(recorded[1])[:, None], torch.from_numpy(recorded[0].astype(np.int64)), experts)
        chosen = probabilities.gather(1, experts)
        return logits, chosen / chosen.sum(-1, keepdim=True) if gate.norm_topk_prob else chosen, experts

    return forward


def _keep_sets(whole: Microbatch) -> KeepSets:
    return KeepSets.from_masks(
        *(
            torch.from_numpy(array)
            for array in (whole.targets, whole.loss_mask, whole.full_rows, whole.keep_ids, whole.keep_offsets)
        )
    )
