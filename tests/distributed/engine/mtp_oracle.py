"""The layer for multi-token prediction by transformers' decoder layer in float64, on the policy's hidden states with the
recorded routes."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from megatron_rl.preflight.oracle import Oracle
from tests.distributed.engine.oracle import hugging_face
from tests.distributed.engine.subject import rollouts_of, weights_of

_NORMS = ("enorm", "hnorm", "shared_head.norm")


class MtpLayer(torch.nn.Module):
    """As DeepSeek-V3 defines it: join the next token's embedding and the hidden state, one decoder layer, one norm."""

    def __init__(self, oracle: Oracle, weights: dict[str, Tensor]) -> None:
        """weights: by their names within the layer."""
        super().__init__()
        self._body, self._config = (oracle.model.model,), oracle.model.config
        own = {name: weight.double() for name, weight in weights.items()}
        self.join = torch.nn.Parameter(own.pop("eh_proj.weight"))
        self.norms = torch.nn.ParameterList()
        for name in _NORMS:
            self.norms.append(torch.nn.Parameter(own.pop(f"{name}.weight")))
        self.layer = DeepseekV3DecoderLayer(self._config, self._config.num_hidden_layers - 1).double().eval()
        parts = [f"mlp.experts.{number}" for number in range(self._config.n_routed_experts)]
        stacked = {
            "mlp.experts.gate_up_proj": [
                torch.cat([own.pop(f"{e}.gate_proj.weight"), own.pop(f"{e}.up_proj.weight")]) for e in parts
            ],
            "mlp.experts.down_proj": [own.pop(f"{e}.down_proj.weight") for e in parts],
        }
        self.layer.load_state_dict(own | {name: torch.stack(experts) for name, experts in stacked.items()})

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        (body,) = self._body
        following = body.embed_tokens(ids.roll(-1, dims=1)).detach()
        places = torch.arange(ids.shape[1])[None]
        joined = torch.cat([self._norm(0, following), self._norm(1, hidden)], dim=-1) @ self.join.T
        mask = create_causal_mask(self._config, joined, attention_mask=None, past_key_values=None, position_ids=places)
        rotary = body.rotary_emb(joined, places)
        return self._norm(2, self.layer(joined, attention_mask=mask, position_ids=places, position_embeddings=rotary))

    def _norm(self, number: int, values: Tensor) -> Tensor:
        norm = DeepseekV3RMSNorm(values.shape[-1], self._config.rms_norm_eps).double()
        del norm.weight
        norm.weight = self.norms[number]
        return norm(values)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """By the names within the layer; of the selection bias, which is a buffer, zeros."""
        yield "eh_proj.weight", self.join.grad
        for name, norm in zip(_NORMS, self.norms, strict=True):
            yield f"{name}.weight", norm.grad
        for name, parameter in self.layer.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if not name.startswith("mlp.experts."):
                yield name, gradient
                continue
            names = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for number, of_expert in enumerate(gradient):
                for part, rows in zip(names, of_expert.chunk(len(names)), strict=True):
                    yield f"mlp.experts.{number}.{part}.weight", rows
        yield "mlp.gate.e_score_correction_bias", torch.zeros(self._config.n_routed_experts)


def expected_ahead(model: str, prefix: str) -> tuple[float, dict[str, Tensor]]:
    """Mean loss of the layer whose names begin with `prefix`, and gradients of its sum over the number of the step's loss
    tokens."""
    oracle = hugging_face(model)
    layer = MtpLayer(oracle, {n.removeprefix(prefix): w for n, w in weights_of(model).items() if n.startswith(prefix)})
    losses, tokens = [], 0
    for rollout in (member.rollout for member in rollouts_of(model)):
        ids = torch.cat([torch.from_numpy(part).long() for part in (rollout.prompt_ids, rollout.completion_ids)])[None]
        with torch.no_grad(), oracle._choices(ids.shape[1], rollout.routed_experts):
            hidden = oracle.model.model(input_ids=ids, use_cache=False).last_hidden_state
        log_probs = (layer(ids, hidden) @ oracle.model.lm_head.weight.T)[0].log_softmax(-1)
        places = (len(rollout.prompt_ids) + number for number in rollout.loss_mask.nonzero()[0])
        losses += [-log_probs[place - 2, ids[0, place]] for place in places if place >= 2]  # two tokens earlier
        tokens += int(rollout.loss_mask.sum())
    total = torch.stack(losses).sum()
    (total / tokens).backward()
    return float(total.detach()) / len(losses), {prefix + name: gradient for name, gradient in layer.gradients()}
